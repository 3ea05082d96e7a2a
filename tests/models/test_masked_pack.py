"""Padded packs under one mask: hidden states, losses and gradients are those of packs that attend by segments."""

import dataclasses

import pytest
import torch

from r3lite.models import lora
from r3lite.models.causal_lm import CausalLM, LayerKind
from r3lite.models.masked_pack import SMALLEST, MaskedPack, PassInputs, has_masked_packs, padded_size
from r3lite.models.packing import Pack, states_at
from tests.lfm2_models import switches
from tests.models.test_packing import CHOSEN, ROWS

CPU = torch.device("cpu")


@pytest.fixture(params=["full attention", "windows"])
def model(small_model, request) -> CausalLM:
    model = small_model()
    if request.param == "windows":
        rope = model.config.kind(0).rope
        kinds = (LayerKind(rope, window=7), LayerKind(rope), LayerKind(rope, window=50))
        windowed = CausalLM(dataclasses.replace(model.config, layer_kinds=kinds)).requires_grad_(False)
        windowed.load_state_dict(model.state_dict())
        model = windowed
    lora.add_adapter(model, "policy", r=4, alpha=8)
    generator = torch.Generator().manual_seed(1)
    for key, parameter in lora.adapter_parameters(model, "policy").items():
        if "lora_B" in key:
            parameter.data.normal_(0, 0.05, generator=generator)
    lora.set_adapter(model, "policy")
    return model.train()


def test_sizes_with_padding():
    sizes = {1: 128, 128: 128, 129: 192, 192: 192, 193: 256, 300: 384, 385: 512, 1024: 1024, 1025: 1536, 3000: 3072}
    assert {size: padded_size(size) for size in sizes} == sizes
    assert padded_size(0) == SMALLEST


def test_ends_are_those_of_the_tree():
    """Three rows share 16 tokens, the first two of them 32; the fourth has nothing in common with the others."""
    stem = [1] * 16
    rows = [[*stem, *[2] * 16, 3], [*stem, *[2] * 16, 4, 4], [*stem, 5], [6, 6]]
    inputs = PassInputs.of(rows, [[True] * len(row) for row in rows], 0.5)
    ids, positions, ends = inputs.pack.tolist()
    assert ids[:38] == [1] * 16 + [2] * 16 + [3, 4, 4, 5, 6, 6]
    assert positions[:38] == [*range(32), 32, 32, 33, 16, 0, 1]
    assert ends[:38] == [36] * 16 + [35] * 16 + [33, 35, 35, 36, 38, 38]
    assert ids[38:] == positions[38:] == [0] * (SMALLEST - 38)
    assert ends[38:] == list(range(39, SMALLEST + 1))
    trained = sum(len(row) - 1 for row in rows)
    assert inputs.weights.tolist() == [0.5] * trained + [0.0] * (SMALLEST - trained)
    assert inputs.shape == (SMALLEST, SMALLEST)


def test_states_and_gradients_are_those_of_a_pack(model):
    parameters = list(lora.adapter_parameters(model, "policy").values())
    packed = Pack.of(ROWS, CPU)
    expected_states = model(packed.tokens, packed)
    places, ids = packed.predicted(CHOSEN)
    inputs = PassInputs.of(ROWS, CHOSEN, 0.25)
    states = model(inputs.pack[:1], MaskedPack(inputs))
    N = packed.tokens.shape[1]
    assert states.isfinite().all() and states.shape[1] > N
    torch.testing.assert_close(states[:, :N], expected_states, rtol=1e-4, atol=1e-5)
    n = len(places)
    assert inputs.targets[:, :n].tolist() == [places.tolist(), ids.tolist()]
    logits = model.logits(states_at(expected_states, places))
    loss = 0.25 * torch.nn.functional.cross_entropy(logits, ids, reduction="sum")
    expected = torch.autograd.grad(loss, parameters)
    padded_logits = model.logits(states_at(states, inputs.targets[0]))
    losses = torch.nn.functional.cross_entropy(padded_logits, inputs.targets[1], reduction="none")
    padded_loss = (losses * inputs.weights).sum()
    torch.testing.assert_close(padded_loss, loss)
    for gradient, expected_gradient in zip(torch.autograd.grad(padded_loss, parameters), expected, strict=True):
        assert expected_gradient.norm() > 0
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-3, atol=1e-5)


def test_inputs_are_overwritten_by_others_of_their_shape():
    first = PassInputs.of(ROWS[:2], CHOSEN[:2], 1.0)
    second = PassInputs.of(ROWS[4:6], CHOSEN[4:6], 0.5)
    assert first.shape == second.shape
    buffers = first.to(CPU)
    buffers.copy_(second)
    for buffer, tensor in zip(buffers, second, strict=True):
        assert torch.equal(buffer, tensor)


def test_models_with_convolutions_have_none(small_model):
    assert has_masked_packs(small_model().config)
    assert not has_masked_packs(small_model(**switches(3)).config)
