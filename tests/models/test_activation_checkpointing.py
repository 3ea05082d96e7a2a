"""Checkpointed gradients equal plain ones, whatever is switched on when `backward` runs; memory is saved."""

import gc
import weakref

import pytest
import torch

from r3lite.core.grant import Grant, Memory
from r3lite.models import activation_checkpointing
from r3lite.models.functions import swiglu
from r3lite.models.kv_cache import KVCache, Prefill
from r3lite.models.lora import adapter_parameters, add_adapter, use_adapter

IDS = torch.arange(60).view(2, 30)
ALL = 3  # layers of the small model


@pytest.fixture
def adapted(small_model):
    """Makes a model with two adapters that matter, one of them with dropout."""

    def make(checkpointing: bool, dropout: float = 0.0):
        model = small_model()
        add_adapter(model, "policy", 4, 8, dropout)
        add_adapter(model, "reference", 2, 8)
        generator = torch.Generator().manual_seed(0)
        for name in ("policy", "reference"):
            for parameter in adapter_parameters(model, name).values():
                parameter.data.normal_(0, 0.1, generator=generator)
        if checkpointing:
            activation_checkpointing.enable(model, Grant(Memory(recompute_layers=ALL)))
        return model

    return make


def gradients(model, name="policy", at_backward="policy"):
    """Gradients of an adapter, with `at_backward` switched on while `backward` runs."""
    torch.manual_seed(0)
    with use_adapter(model, name):
        loss = model(IDS).square().mean()
    with use_adapter(model, at_backward):
        loss.backward()
    return {key: p.grad for key, p in adapter_parameters(model, name).items()}


def assert_same(ours, theirs):
    for key, grad in theirs.items():
        assert grad.abs().sum() > 0
        assert torch.allclose(ours[key], grad, atol=1e-6), key


@pytest.mark.parametrize("training", [True, False])
def test_gradients_equal_the_plain_ones(adapted, training):
    assert_same(gradients(adapted(True).train(training)), gradients(adapted(False).train(training)))


@pytest.mark.parametrize("at_backward", [None, "reference"])
def test_backward_runs_the_layers_again_with_the_adapter_of_the_forward_pass(adapted, at_backward):
    """`loss.backward()` stands outside the `with` block as often as not; the second run of a layer saw no adapter."""
    model = adapted(True)
    assert_same(gradients(model, at_backward=at_backward), gradients(adapted(False)))
    assert model.lora.active is None


def test_dropout_drops_the_same_in_both_runs(adapted):
    assert_same(gradients(adapted(True, 0.5).train()), gradients(adapted(False, 0.5).train()))


def test_fewer_activations_are_kept(adapted):
    def saved_bytes(model) -> int:
        sizes = {}
        hooks = (
            lambda t: sizes.__setitem__(t.untyped_storage()._cdata, t.untyped_storage().nbytes()) or t,
            lambda t: t,
        )
        weights = {p.untyped_storage()._cdata for p in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(*hooks), use_adapter(model, "policy"):
            loss = model(IDS).square().mean()
        del loss
        return sum(size for key, size in sizes.items() if key not in weights)

    assert saved_bytes(adapted(True)) < 0.2 * saved_bytes(adapted(False))


def test_passes_without_gradients_and_with_a_cache_are_as_before(adapted):
    model = adapted(True)
    cache = KVCache.of(model, 2)
    with torch.no_grad(), use_adapter(model, "policy"):
        full_states = model(IDS)
        parts = []
        for part in (slice(0, 11), slice(11, None)):
            prefill = Prefill(cache, [(row, IDS[row, part].tolist()) for row in range(2)])
            parts.append(model(prefill.tokens, prefill).view(2, -1, full_states.shape[-1]))
    assert not full_states.requires_grad and torch.allclose(full_states, torch.cat(parts, dim=1), atol=1e-5)


def test_the_first_layer_s_input_requires_a_gradient_only_if_the_layer_is_run_again(adapted):
    """With nothing trainable below it, it does not by itself, and autograd would take the layer for one without."""
    model, grant, hidden = adapted(False), Grant(Memory(recompute_layers=1)), []
    activation_checkpointing.enable(model, grant)
    model.model.embed_tokens.register_forward_hook(lambda module, inputs, out: hidden.append(out))
    model(IDS)
    assert hidden[-1].requires_grad
    with torch.no_grad():
        model(IDS)
    assert not hidden[-1].requires_grad
    grant.memory = Memory(recompute_layers=0)
    model(IDS)
    assert not hidden[-1].requires_grad


@pytest.mark.parametrize(
    "memory",
    [
        Memory(recompute_layers=1),
        Memory(recompute_layers=0),
        Memory(recompute_layers=ALL, mlp_tile=7),
        Memory(recompute_layers=ALL, offload=True),
    ],
)
def test_gradients_are_the_same_however_little_is_kept(adapted, memory):
    model, grant = adapted(False), Grant(memory)
    activation_checkpointing.enable(model, grant)
    assert_same(gradients(model), gradients(adapted(False)))
    grant.memory = Memory(recompute_layers=ALL)  # other figures are in force without anybody applying them
    assert_same(gradients(model), {k: 2 * g for k, g in gradients(adapted(False)).items()})


def test_a_pass_that_failed_leaves_nothing_behind_for_the_next(adapted):
    """Memory runs out between forward and backward; the inputs on the host were those of the pass that failed."""
    model, grant = adapted(False), Grant(Memory(recompute_layers=ALL, offload=True))
    activation_checkpointing.enable(model, grant)
    with use_adapter(model, "policy"):
        model(IDS.flip(0))  # no backward
    grant.memory = Memory(recompute_layers=ALL, offload=True, mlp_tile=7)
    expected = gradients(adapted(False))
    assert_same(gradients(model), expected)
    assert_same(gradients(model), {k: 2 * g for k, g in expected.items()})


def test_the_first_layers_are_those_that_run_again(adapted):
    """The last ones' activations are gone when the first is run again, so that both are never held together."""
    model, runs = adapted(False), []
    activation_checkpointing.enable(model, Grant(Memory(recompute_layers=1)))
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_pre_hook(lambda module, inputs, i=i: runs.append(i))
    gradients(model)
    assert runs == [*range(len(model.model.layers)), 0]


def test_a_tiled_mlp_gives_the_same_without_gradients(adapted, monkeypatch):
    model = adapted(False)
    widths = []
    with torch.no_grad(), use_adapter(model, "policy"):
        untiled = model(IDS)
        activation_checkpointing.enable(model, Grant(Memory(mlp_tile=7)))
        for layer in model.model.layers:
            monkeypatch.setattr(layer.mlp, "activation", lambda x: widths.append(len(x)) or swiglu(x))
        tiled = model(IDS)
    assert torch.allclose(untiled, tiled, atol=1e-5) and widths == ([7] * 8 + [4]) * len(model.model.layers)


def test_the_second_run_has_the_autocast_of_the_first(adapted, monkeypatch):
    """`backward` stands outside the autocast; the layers were then run again in fp32."""
    model = adapted(True)
    dtypes = []
    for layer in model.model.layers:
        monkeypatch.setattr(layer.mlp, "activation", lambda x: dtypes.append(x.dtype) or swiglu(x))
    with torch.autocast("cpu", torch.bfloat16), use_adapter(model, "policy"):
        loss = model(IDS).float().square().mean()
    loss.backward()
    assert dtypes == [torch.bfloat16] * 2 * len(model.model.layers)


def test_a_checkpointing_model_is_freed_without_the_garbage_collector(adapted):
    """A run function that holds the model makes a cycle, and gigabytes of weights stay until a collection."""
    gc.disable()
    try:
        model = adapted(True)
        gone = weakref.ref(model)
        del model
        assert gone() is None
    finally:
        gc.enable()
