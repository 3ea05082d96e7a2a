"""The watch on activations."""

import math

import torch

from r3lite.models.hooks import ActivationWatch

IDS = torch.arange(20)[None]


def test_largest_magnitudes_by_layer(small_model):
    model, outputs = small_model(), {}
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda module, inputs, out, i=i: outputs.setdefault(i, []).append(out.abs().max()))
    with ActivationWatch(model) as watch:
        model(IDS), model(IDS + 30)
    for i in range(3):
        assert math.isclose(watch.largest[f"model.layers.{i}"], max(outputs[i]), rel_tol=1e-6)
    assert watch.first_overflow is None
    assert watch.report().startswith("no layer overflowed; the largest finite activation was")


def test_an_fp16_overflow_is_explained_by_its_layer(small_model):
    """Layer 1 adds more to the residual stream than fp16 holds; layer 2 makes nan of it."""
    model = small_model().half()
    model.model.layers[1].mlp.down_proj.weight.fill_(6e4)
    with torch.no_grad(), ActivationWatch(model) as watch:
        assert not torch.isfinite(model(IDS)).all()
    assert watch.first_overflow == "model.layers.1"
    assert math.isfinite(watch.largest["model.layers.0"]) and not math.isfinite(watch.largest["model.layers.2"])
    report = watch.report()
    assert report.startswith("model.layers.1 was the first layer to give inf or nan")
    assert "after model.layers.0" in report and "65,504" in report


def test_a_nan_is_not_forgotten(small_model):
    model = small_model()
    with torch.no_grad(), ActivationWatch(model) as watch:
        saved = model.model.embed_tokens.weight[3].clone()
        model.model.embed_tokens.weight[3] = math.nan
        model(IDS)
        model.model.embed_tokens.weight[3] = saved
        model(IDS)
    assert math.isnan(watch.largest["model.layers.0"]) and watch.first_overflow == "model.layers.0"


def test_hooks_are_gone_after_the_block(small_model):
    model = small_model()
    try:
        with ActivationWatch(model) as watch:
            raise ValueError
    except ValueError:
        model(IDS)
    assert watch.largest == {}
    assert not any(layer._forward_hooks for layer in model.model.layers)
