"""Log-probabilities against a plain log-softmax in float64, and that the logits are never there as a whole."""

import pytest
import torch

from r3lite.devices.live_tensors import UncompiledMode
from r3lite.models import logprobs as logprobs_module
from r3lite.models.logprobs import candidates_loss, cross_entropy, token_logprobs, token_loss, top_logprobs

N, C, V = 37, 16, 101


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, C, generator=generator)
    head = torch.randn(V, C, generator=generator)
    targets = torch.randint(V, (N,), generator=generator)
    upstream = torch.randn(2, N, generator=generator)
    return hidden, head, targets, upstream


def plain(hidden, head, targets, temperature):
    """Log-probabilities and entropies [N] by definition, in float64."""
    logprobs = torch.log_softmax(hidden.double() @ head.double().T / temperature, dim=-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("chunk", [1, 8, 37, 128])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_values_and_gradients(inputs, temperature, chunk):
    hidden, head, targets, upstream = inputs
    ours, theirs = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    logprobs, entropies = token_logprobs(ours, head, targets, temperature, chunk, with_entropy=True)
    expected = plain(theirs, head, targets, temperature)
    assert logprobs.dtype == entropies.dtype == torch.float32 and not logprobs.requires_grad
    assert torch.allclose(logprobs.double(), expected[0], atol=1e-5)
    assert torch.allclose(entropies.double(), expected[1], atol=1e-5)

    def weighted(rows, logprobs, entropies):
        return (logprobs * upstream[0, rows] + entropies * upstream[1, rows]).sum(), {}

    token_loss(ours, head, targets, weighted, temperature, chunk, with_entropy=True)[0].backward()
    (expected[0] * upstream[0] + expected[1] * upstream[1]).sum().backward()
    assert torch.allclose(ours.grad.double(), theirs.grad, atol=1e-4)


def relative_error(ours, theirs):
    return float((ours.double() - theirs).norm() / theirs.norm())


def losses_of(inputs):
    """A loss per token that bends and has an entropy term, for our rows and for the plain path alike."""
    _, _, _, (weight, bonus) = inputs

    def loss(rows, logprobs, entropies):
        per_token = logprobs.exp() * weight[rows] - bonus[rows] * entropies
        return per_token.sum(), {"loss": per_token.detach().sum()}

    return loss


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_gradients_against_the_plain_path_in_float64(inputs, dtype, bound):
    hidden, head, targets, _ = inputs
    head = head / C**0.5  # logits of size 1, as a model has them
    loss = losses_of(inputs)
    ours = hidden.to(dtype).requires_grad_()
    theirs = ours.detach().double().requires_grad_()
    options = dict(temperature=0.7, chunk=8, with_entropy=True)
    value, _ = token_loss(ours, head.to(dtype), targets, loss, **options)
    expected, _ = loss(slice(None), *plain(theirs, head.to(dtype), targets, 0.7))
    assert value.item() == pytest.approx(expected.item(), rel=10 * bound)
    (value * 3).backward()
    (expected * 3).backward()
    assert relative_error(ours.grad, theirs.grad) <= bound


def test_small_shares_of_a_loss_do_not_vanish_in_fp16(inputs):
    """A token's share of a mini-batch is 1e-5, times a probability of 1e-2: below what fp16 can hold."""
    hidden, head, targets, _ = inputs
    hidden, head = hidden.half().requires_grad_(), head.half()
    token_loss(hidden, head, targets, lambda rows, logprobs, _: (-1e-6 * logprobs.sum(), {}))[0].mul(2.0**16).backward()
    theirs = hidden.detach().double().requires_grad_()
    (-1e-6 * 2.0**16 * plain(theirs, head, targets, 1.0)[0].sum()).backward()
    assert relative_error(hidden.grad, theirs.grad) <= 2e-3


def test_a_loss_makes_each_chunk_of_logits_once(inputs, monkeypatch):
    hidden, head, targets, _ = inputs
    chunk_sizes = []
    make = logprobs_module._logits
    monkeypatch.setattr(logprobs_module, "_logits", lambda *a: chunk_sizes.append(len(a[0])) or make(*a))
    token_loss(hidden.requires_grad_(), head, targets, cross_entropy, chunk=8)[0].backward()
    assert chunk_sizes == [8, 8, 8, 8, 5]
    with torch.no_grad():
        assert not token_loss(hidden, head, targets, losses_of(inputs), with_entropy=True)[0].requires_grad


@pytest.mark.parametrize("trained", [True, False])
def test_the_metrics_of_each_chunk_come_back_with_the_loss(inputs, trained):
    hidden, head, targets, _ = inputs
    loss, metrics = token_loss(
        hidden.requires_grad_(trained), head, targets, losses_of(inputs), chunk=8, with_entropy=True
    )
    assert loss.requires_grad == trained and len(metrics) == 5
    assert torch.equal(sum(m["loss"] for m in metrics), loss.detach())
    assert not any(m["loss"].requires_grad for m in metrics)


def test_without_entropy_or_gradients(inputs):
    hidden, head, targets, _ = inputs
    with torch.no_grad():
        logprobs, entropies = token_logprobs(hidden, head, targets)
    assert entropies is None and not logprobs.requires_grad
    assert torch.allclose(logprobs.double(), plain(hidden, head, targets, 1.0)[0], atol=1e-5)


class NoMoreRows(UncompiledMode):
    """Fails when an operator makes a tensor with more than `rows` rows of V numbers; remembers the most it saw."""

    def __init__(self, rows: int):
        super().__init__()
        self.rows, self.most_rows = rows, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and V in tensor.shape and C not in tensor.shape:
                rows = tensor.numel() // V
                self.most_rows = max(self.most_rows, rows)
                assert rows <= self.rows, f"{function} made a tensor {list(tensor.shape)}"
        return out


def test_the_logits_are_never_there_as_a_whole(inputs):
    hidden, head, targets, _ = inputs
    hidden.requires_grad_()
    with NoMoreRows(8) as loss_watch:
        token_loss(hidden, head, targets, losses_of(inputs), chunk=8, with_entropy=True)[0].backward()
    with NoMoreRows(8) as watch:
        token_logprobs(hidden, head, targets, chunk=8, with_entropy=True)
    assert loss_watch.most_rows == watch.most_rows == 8
    with pytest.raises(AssertionError, match="made a tensor"), NoMoreRows(8):
        token_logprobs(hidden, head, targets, chunk=9)


def test_no_chunk_of_logits_is_kept_for_the_backward_pass(inputs):
    hidden, head, targets, _ = inputs
    saved_shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved_shapes.append(t.shape) or t, lambda t: t):
        token_loss(hidden.requires_grad_(), head, targets, losses_of(inputs), chunk=8, with_entropy=True)
    assert saved_shapes and not [shape for shape in saved_shapes if V in shape and C not in shape]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_normalized_in_fp32(inputs, dtype):
    """As the sampler does it: logits in the head's dtype, then fp32. A log-softmax in bf16 is off by 1 in 100."""
    hidden, head, targets, _ = inputs
    hidden, head = hidden.to(dtype), head.to(dtype)
    logits = (hidden @ head.T).float()
    expected = torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]
    assert torch.allclose(token_logprobs(hidden, head, targets)[0], expected, atol=1e-5)
    # The final norm gives fp32 where the residual stream is fp32 under autocast.
    assert torch.allclose(token_logprobs(hidden.float(), head, targets)[0], expected, atol=1e-5)
    with torch.autocast("cpu", dtype):
        logprobs, entropies = token_logprobs(hidden.float(), head, targets, with_entropy=True)
    assert torch.allclose(logprobs, expected, atol=1e-5)
    # Autocast made a 16-bit product of it, whose dtype exgrpo's replays in bf16 stumbled over.
    exact_logprobs = torch.log_softmax(logits.double(), -1)
    assert entropies.dtype == torch.float32
    assert torch.allclose(entropies.double(), -(exact_logprobs.exp() * exact_logprobs).sum(-1), atol=1e-5)


def test_huge_logits_and_ids_beyond_the_head(inputs):
    hidden, head, targets, _ = inputs
    logprobs, entropies = token_logprobs(hidden * 1e4, head, targets, with_entropy=True)
    assert torch.isfinite(logprobs).all() and torch.isfinite(entropies).all()
    fewer = token_logprobs(hidden, head[:60], targets % 60)[0]
    assert torch.allclose(fewer.double(), plain(hidden, head[:60], targets % 60, 1.0)[0], atol=1e-5)
    assert (fewer > token_logprobs(hidden, head, targets % 60)[0]).all()


def test_no_rows(inputs):
    hidden, head, targets, _ = inputs
    hidden.requires_grad_()
    logprobs, entropies = token_logprobs(hidden[:0], head, targets[:0], with_entropy=True)
    assert logprobs.shape == entropies.shape == (0,)
    token_loss(hidden[:0], head, targets[:0], cross_entropy)[0].backward()
    assert hidden.grad.abs().sum() == 0


K = 7


@pytest.fixture
def ids_and_weights():
    """K different tokens for each row, and what a loss weighs their log-probabilities with."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N, V, generator=generator).topk(K).indices.int(), torch.randn(N, K, generator=generator)


def loss_of_candidates(weight):
    """A loss that bends, with gradients of either sign."""

    def loss(rows, logprobs):
        value = (logprobs.exp() * weight[rows] - 0.1 * logprobs).sum()
        return value, {"loss": value.detach()}

    return loss


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("chunk", [1, 8, 128])
def test_the_loss_of_several_tokens_a_row_against_the_plain_path_in_float64(
    inputs, ids_and_weights, dtype, bound, chunk
):
    hidden, head, _, _ = inputs
    (ids, weight), head = ids_and_weights, (head / C**0.5).to(dtype)
    ours = hidden.to(dtype).requires_grad_()
    theirs = ours.detach().double().requires_grad_()
    value, metrics = candidates_loss(ours, head, ids, loss_of_candidates(weight), 0.7, chunk)
    logprobs = torch.log_softmax(theirs @ head.double().T / 0.7, dim=-1).gather(-1, ids.long())
    expected, _ = loss_of_candidates(weight.double())(slice(None), logprobs)
    assert value.item() == pytest.approx(expected.item(), rel=10 * bound)
    assert sum(m["loss"] for m in metrics).item() == pytest.approx(value.item())
    (value * 3).backward()
    (expected * 3).backward()
    assert relative_error(ours.grad, theirs.grad) <= bound


def test_one_token_a_row_is_the_loss_of_a_target(inputs):
    hidden, head, targets, _ = inputs
    candidates_hidden, targets_hidden = (hidden.clone().requires_grad_() for _ in range(2))
    loss, _ = candidates_loss(candidates_hidden, head, targets[:, None], lambda rows, logprobs: (-logprobs.sum(), {}))
    expected, _ = token_loss(targets_hidden, head, targets, cross_entropy)
    loss.backward()
    expected.backward()
    assert torch.allclose(loss, expected) and torch.allclose(candidates_hidden.grad, targets_hidden.grad, atol=1e-5)


def test_the_likeliest_tokens(inputs):
    hidden, head, _, _ = inputs
    top = top_logprobs(hidden, head, K, chunk=8)
    expected = torch.log_softmax(hidden.double() @ head.double().T, dim=-1).topk(K)
    assert torch.equal(top.ids.long(), expected.indices)
    assert torch.allclose(top.logprobs.double(), expected.values, atol=1e-5)
    parts = top.split([30, 7])
    assert torch.equal(parts[1].ids, top.ids[30:]) and torch.equal(parts[0].logprobs, top.logprobs[:30])


def test_the_logits_of_several_tokens_a_row_are_never_there_as_a_whole(inputs, ids_and_weights):
    hidden, head, _, _ = inputs
    ids, weight = ids_and_weights
    with NoMoreRows(8) as watch:
        candidates_loss(hidden.requires_grad_(), head, ids, loss_of_candidates(weight), chunk=8)[0].backward()
    with NoMoreRows(8) as top_watch:
        top_logprobs(hidden, head, K, chunk=8)
    assert watch.most_rows == top_watch.most_rows == 8
