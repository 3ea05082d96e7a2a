"""The gated delta rule in chunks against the same step by step, and both against transformers' functions."""

import pytest
import torch

from r3lite.models.gated_delta import CHUNK, ChunkPlan, DeltaHeads, DeltaInputs, delta_chunks, delta_step

HEADS = DeltaHeads(key_heads=2, value_heads=4, key_dim=12, value_dim=20)
LENGTHS = [1, 5, CHUNK, CHUNK + 1, 3 * CHUNK - 7]


def random_inputs(tokens: int, seed: int = 0, heads: DeltaHeads = HEADS) -> DeltaInputs:
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(tokens, sum(heads.sizes), generator=generator)
    log_decay = -torch.rand(tokens, heads.value_heads, generator=generator) * 2
    strength = torch.rand(tokens, heads.value_heads, generator=generator)
    return DeltaInputs(*(tensor.requires_grad_() for tensor in (qkv, log_decay, strength)))


def random_states(rows: int, heads: DeltaHeads = HEADS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(rows, *heads.state_shape, generator=generator).requires_grad_()


def by_steps(inputs: DeltaInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [T, ..] and the last state [1, ..] of one row."""
    outputs = []
    for token in range(len(inputs.qkv)):
        out, state = delta_step(DeltaInputs(*(x[token : token + 1] for x in inputs)), state, HEADS)
        outputs.append(out)
    return torch.cat(outputs), state


def gradients(out: torch.Tensor, state: torch.Tensor, leaves) -> list[torch.Tensor]:
    return torch.autograd.grad(out.sin().sum() + state.cos().sum(), leaves)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_chunks_are_the_steps_with_their_gradients(tokens):
    inputs = random_inputs(tokens)
    start = random_states(1)
    leaves = [*inputs, start]
    plan = ChunkPlan([tokens], [None], torch.device("cpu"))
    out, state = delta_chunks(inputs, start, HEADS, plan)
    expected_out, expected_state = by_steps(inputs, start)
    torch.testing.assert_close(out, expected_out, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(state, expected_state, atol=1e-5, rtol=1e-4)
    for grad, expected in zip(gradients(out, state, leaves), gradients(expected_out, expected_state, leaves)):
        torch.testing.assert_close(grad, expected, atol=1e-4, rtol=1e-3)


def test_a_tree_is_its_rows():
    """Of three roots one has two branches, one of which branches again. What they share is run once."""
    sizes = [70, 3, 130, 65, 1, 90, 64]
    parents = [None, 0, 0, 2, 2, None, None]
    paths = [[0, 1], [0, 2, 3], [0, 2, 4], [5], [6]]
    inputs = random_inputs(sum(sizes))
    starts = random_states(3)
    leaves = [*inputs, starts]
    roots = {0: 0, 5: 1, 6: 2}
    out, states = delta_chunks(inputs, starts, HEADS, ChunkPlan(sizes, parents, torch.device("cpu")))
    outputs = out.split(sizes)
    stretches = list(zip(*(x.split(sizes) for x in inputs), strict=True))
    total = 0
    expected_total = 0
    for path in paths:
        row = DeltaInputs(*(torch.cat([stretches[i][part] for i in path]) for part in range(3)))
        expected, expected_state = by_steps(row, starts[roots[path[0]]][None])
        row_output = torch.cat([outputs[i] for i in path])
        torch.testing.assert_close(row_output, expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(states[path[-1]], expected_state[0], atol=1e-5, rtol=1e-4)
        total += row_output.sin().sum() + states[path[-1]].cos().sum()
        expected_total += expected.sin().sum() + expected_state.cos().sum()
    expected_grads = torch.autograd.grad(expected_total, leaves)
    for grad, expected in zip(torch.autograd.grad(total, leaves), expected_grads):
        torch.testing.assert_close(grad, expected, atol=1e-4, rtol=1e-3)


def test_many_rows_are_each_by_itself():
    """More than are computed at once, and the states of some are never read again."""
    rows = 40
    inputs = random_inputs(rows * 3)
    out, states = delta_chunks(inputs, None, HEADS, ChunkPlan([3] * rows, [None] * rows, torch.device("cpu")))
    zeros = torch.zeros(1, *HEADS.state_shape)
    for row in (0, 17, 39):
        part = DeltaInputs(*(x[3 * row : 3 * row + 3] for x in inputs))
        expected, state = by_steps(part, zeros)
        torch.testing.assert_close(out[3 * row : 3 * row + 3], expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(states[row], state[0], atol=1e-5, rtol=1e-4)
    (grad,) = torch.autograd.grad(out[3:6].sum(), inputs.qkv)
    assert grad[3:6].abs().sum() > 0 and grad[:3].abs().sum() == grad[6:].abs().sum() == 0


@pytest.mark.parametrize("tokens", [7, 150])
@torch.no_grad()
def test_both_forms_are_those_of_transformers(tokens):
    qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    inputs = random_inputs(tokens)
    start = random_states(1)
    q, k, v = inputs.qkv[None].split(HEADS.sizes, -1)
    theirs = {
        "query": q.unflatten(-1, (2, 12)), "key": k.unflatten(-1, (2, 12)), "value": v.unflatten(-1, (4, 20)),
        "g": inputs.log_decay[None], "beta": inputs.strength[None], "initial_state": start,
        "output_final_state": True, "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip
    chunks = delta_chunks(inputs, start, HEADS, ChunkPlan([tokens], [None], torch.device("cpu")))
    steps = by_steps(inputs, start)
    for function in (qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule):
        expected_out, expected_state = function(**theirs)
        for out, state in (chunks, steps):
            torch.testing.assert_close(out, expected_out[0].flatten(1), atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(state, expected_state, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_half_precision_is_computed_in_fp32_also_under_autocast():
    inputs = random_inputs(100)
    half = DeltaInputs(inputs.qkv.bfloat16(), inputs.log_decay, inputs.strength.bfloat16())
    exact = DeltaInputs(half.qkv.float(), half.log_decay, half.strength.float())
    plan = ChunkPlan([100], [None], torch.device("cpu"))
    expected, expected_states = delta_chunks(exact, None, HEADS, plan)
    with torch.autocast("cpu", torch.bfloat16):
        out, states = delta_chunks(half, None, HEADS, plan)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected.bfloat16())
    assert torch.equal(states, expected_states)
