"""NF4: the format against its definition, the layer against a dense one, memory, adapters on top."""

import json
import statistics
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from r3lite.core.errors import R3LiteError
from r3lite.core.grant import Grant, Memory
from r3lite.models import activation_checkpointing, nf4, projections
from r3lite.models.lora import LoraLinear, adapter_parameters, add_adapter, merge_adapter, remove_adapter, use_adapter
from r3lite.models.nf4 import dequantize, quantize
from r3lite.models.projections import Nf4Linear
from r3lite.models.saving import save_merged, save_nf4
from r3lite.models.weights import checkpoint_tensors, load_model
from tests.errors import raises

IDS = torch.arange(5, 45)[None]
SIZES = {"intermediate_size": 128}  # in_features must be multiples of 64


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def layer(out: int, features: int, bias: bool = True, dtype: torch.dtype = torch.float32) -> Nf4Linear:
    b = nn.Parameter(normal(out, seed=9).to(dtype), requires_grad=False) if bias else None
    return Nf4Linear(quantize(normal(out, features)), b, dtype)


def reference(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, places in units of absmax, and the weights after a round trip, in float64 straight from the definition."""
    blocks = weight.astype(np.float64).reshape(-1, 64)
    absmax = np.abs(blocks).max(axis=1)
    units = blocks / absmax[:, None]
    codes = np.abs(units[..., None] - np.array(nf4.POINTS)).argmin(axis=-1)
    mean, restored = absmax.mean(), []
    for start in range(0, len(absmax), 256):
        group = absmax[start : start + 256] - mean
        step = np.abs(group).max() / 127
        restored.append(np.round(group / step) * step + mean)
    values = np.array(nf4.POINTS)[codes] * np.concatenate(restored)[:, None]
    return codes.reshape(-1), units.reshape(-1), values.reshape(weight.shape)


def test_the_code_points_are_quantiles_of_the_normal_distribution():
    """The paper's appendix E as its authors publish it: the outermost points lie half a bin inside the tails, on
    average over the sides, one of which has 8 bins and the other 7."""
    quantile = statistics.NormalDist().inv_cdf
    offset = (1 - 1 / 32 + 1 - 1 / 30) / 2
    side = [[quantile(0.5 + (offset - 0.5) * i / n) for i in range(1, n + 1)] for n in (7, 8)]
    points = [-p for p in reversed(side[0])] + [0.0] + side[1]
    assert np.abs(np.array(points) / quantile(offset) - np.array(nf4.POINTS)).max() < 1e-6
    assert list(nf4.POINTS) == sorted(nf4.POINTS) and len(nf4.POINTS) == 16
    assert (nf4.POINTS[0], nf4.POINTS[7], nf4.POINTS[15]) == (-1, 0, 1)
    assert [float(np.float32(p)) for p in nf4.POINTS] == list(nf4.POINTS)  # nothing is lost in fp32


@pytest.mark.parametrize("tile", [2**19, 640, 1])
@pytest.mark.parametrize(("out", "features"), [(300, 320), (7, 64), (64, 1024)])
def test_round_trip_against_the_definition(monkeypatch, out, features, tile):
    monkeypatch.setattr(nf4, "TILE", tile)
    weight = normal(out, features)
    codes, units, values = reference(weight.numpy())
    packed = quantize(weight)
    ours = torch.stack((packed.codes >> 4, packed.codes & 15), dim=-1).view(-1).numpy()
    middles = (np.array(nf4.POINTS)[1:] + np.array(nf4.POINTS)[:-1]) / 2
    tie = np.abs(units[:, None] - middles).min(axis=1) < 1e-6
    assert (ours == codes)[~tie].all() and tie.mean() < 1e-3
    restored = dequantize([packed], torch.float32).double().numpy()
    assert np.abs(restored - values).reshape(-1)[~tie].max() < 1e-7
    for measure in (np.mean, np.max):
        error, expected = (measure(np.abs(v - weight.numpy())) for v in (restored, values))
        assert abs(error - expected) < 1e-6 * expected + 1e-8
    rms = np.sqrt(np.mean((restored - weight.numpy()) ** 2)) / np.sqrt(np.mean(weight.numpy() ** 2))
    assert 0.085 < rms < 0.105  # of normal weights in blocks of 64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes_are_rounded_once(dtype):
    weight = normal(20, 192).to(dtype)
    packed = quantize(weight)
    assert all(torch.equal(a, b) for a, b in zip(vars(packed).values(), vars(quantize(weight.float())).values()))
    assert torch.equal(dequantize([packed], dtype), dequantize([packed], torch.float32).to(dtype))


def test_a_byte_by_hand():
    weight = torch.zeros(2, 128)
    weight[0, :4] = torch.tensor([2.0, -2.0, 0.35, 0.16])  # in units of absmax 1, -1, 0.175, 0.08
    packed = quantize(weight)
    assert packed.codes.shape == (2, 64) and packed.codes[0, :3].tolist() == [0xF0, 0x98, 0x77]
    # absmax is 2, 0, 0, 0, its mean 0.5: 1.5 and -0.5 above that are 127 and -42 steps.
    assert packed.absmax_mean == 0.5 and packed.absmax.shape == (1, 256)
    assert packed.absmax[0, :6].tolist() == [127, -42, -42, -42, 0, 0]
    expected = torch.zeros(2, 128)
    expected[0, :4] = 2 * torch.tensor([1, -1, nf4.POINTS[9], nf4.POINTS[8]])
    assert torch.allclose(dequantize([packed], torch.float32), expected, atol=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.25, -3.0])
def test_equal_weights_are_exact(value):
    """Nothing is divided by the spread of absmax, or the absmax, that is zero."""
    weight = torch.full((3, 128), value)
    assert torch.equal(dequantize([quantize(weight)], torch.float32), weight)


def test_double_quantization_is_off_by_half_a_step_at_most():
    weight = normal(512, 128) * torch.linspace(0.1, 3, 512)[:, None]
    packed = quantize(weight)
    absmax = weight.view(-1, 64).abs().amax(dim=-1).view(-1, 256)  # 1024 blocks: 4 groups
    restored = packed.absmax * packed.absmax_scale[:, None] + packed.absmax_mean[:, None]
    assert ((restored - absmax).abs() <= packed.absmax_scale[:, None] * 0.5 * (1 + 1e-4)).all()
    assert torch.allclose(packed.absmax_scale, (absmax - absmax.mean()).abs().amax(dim=-1) / 127)


def test_bytes_of_a_weight():
    packed = quantize(normal(896, 896))
    size = sum(t.numel() * t.element_size() for t in vars(packed).values())
    assert size / 896**2 <= 0.5 + 1 / 64 + 4 / (64 * 256) + 300 / 896**2
    dtypes = {n: t.dtype for n, t in vars(packed).items()}
    fp32 = torch.float32
    assert dtypes == {"codes": torch.uint8, "absmax": torch.int8, "absmax_scale": fp32, "absmax_mean": fp32}


def test_a_width_that_is_no_multiple_of_the_block_is_refused(small_model, write_folder, tmp_path):
    folder = write_folder(small_model(), tmp_path)  # intermediate_size is 96
    with raises(R3LiteError, "nf4-columns", "96"):
        load_model(folder, torch.float32, "cpu", quantize=True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.0), (torch.float16, 0.0)])
def test_the_layer_equals_a_dense_one(dtype, tolerance, bias):
    ours = layer(96, 128, bias, dtype)
    dense = ours.dense()
    assert dense.weight.dtype == dtype and not dense.weight.requires_grad
    x = [normal(2, 5, 128, seed=1).to(dtype).requires_grad_() for _ in range(2)]
    out = [ours(x[0]), dense(x[1])]
    assert (out[0] - out[1]).abs().max() <= tolerance and out[0].dtype == dtype
    upstream = normal(2, 5, 96, seed=2).to(dtype)
    for y in out:
        y.backward(upstream)
    assert (x[0].grad - x[1].grad).abs().max() <= tolerance and x[0].grad.dtype == dtype
    assert x[0].grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("outer", [torch.float32, torch.float16, torch.bfloat16])
def test_autocast_decides_the_dtype_of_the_product(dtype, outer):
    ours = layer(96, 128, dtype=dtype)
    dense = ours.dense()
    x = [normal(5, 128, seed=1).to(outer).requires_grad_() for _ in range(2)]
    with torch.autocast("cpu", dtype):
        out = [ours(x[0]), dense(x[1])]
    assert out[0].dtype == dtype and torch.equal(*out)
    for y in out:
        y.float().square().sum().backward()
    assert x[0].grad.dtype == outer and torch.equal(x[0].grad, x[1].grad)


def test_wide_activations_on_a_narrow_layer():
    ours = layer(96, 128, dtype=torch.bfloat16)
    x = normal(5, 128)
    expected = F.linear(x, dequantize([ours.weight], torch.float32), ours.bias.float())
    assert torch.equal(ours(x), expected)


@pytest.fixture
def dense_weights(monkeypatch):
    """Weak references to all dense weights that are made."""
    dense_refs = []

    def watched(weights, dtype):
        dense = dequantize(weights, dtype)
        dense_refs.append(weakref.ref(dense.untyped_storage()))
        return dense

    monkeypatch.setattr(projections, "dequantize", watched)
    return dense_refs


def test_no_dense_weight_lives_between_forward_and_backward(dense_weights):
    ours, saved = layer(256, 512), []
    x = normal(2, 512).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        out = ours(x).square()
    assert len(dense_weights) == 1 and all(w() is None for w in dense_weights)
    assert max(saved) <= out.numel()
    out.sum().backward()
    assert len(dense_weights) == 2 and all(w() is None for w in dense_weights)
    with torch.no_grad():
        ours(x)
    ours(x.detach()).sum()  # nothing to backpropagate to
    assert all(w() is None for w in dense_weights)


def test_checkpointed_layers_keep_no_dense_weight(small_model, write_folder, tmp_path, dense_weights):
    model = load_model(write_folder(small_model(**SIZES), tmp_path), torch.float32, "cpu", quantize=True)
    add_adapter(model, "a", 4, 8)
    activation_checkpointing.enable(model, Grant(Memory(recompute_layers=len(model.model.layers))))
    with use_adapter(model, "a"):
        loss = model(IDS).square().mean()
    assert len(dense_weights) == 3 * 4 and all(w() is None for w in dense_weights)
    loss.backward()
    assert all(w() is None for w in dense_weights)


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_quantized_and_what_is_not(small_model, write_folder, tmp_path, tied):
    source = small_model(**SIZES, tie_word_embeddings=tied)
    model = load_model(write_folder(source, tmp_path), torch.bfloat16, "cpu", quantize=True)
    assert sum(isinstance(m, Nf4Linear) for m in model.modules()) == 3 * 7
    assert sum(type(m) is nn.Linear for m in model.modules()) == (not tied)  # the head
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in model.parameters()) and not any(m.training for m in model.modules())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, source.get_parameter(name).bfloat16())
    for path, module in model.named_modules():
        if isinstance(module, Nf4Linear):
            dense = source.get_submodule(path).weight
            assert torch.equal(dequantize([module.weight], torch.float32), dequantize([quantize(dense)], torch.float32))
    hidden = model(IDS)
    assert hidden.dtype == torch.bfloat16
    assert F.cosine_similarity(hidden.float(), source(IDS), dim=-1).mean() > 0.9


def logits(model, name=None):
    with torch.no_grad(), use_adapter(model, name):
        return model.logits(model(IDS)).float()


def test_an_adapter_on_nf4_trains_and_the_base_stays(small_model, write_folder, tmp_path):
    model = load_model(write_folder(small_model(**SIZES), tmp_path), torch.bfloat16, "cpu", quantize=True)
    state_before = {n: t.clone() for n, t in model.state_dict().items()}
    bare = logits(model)
    add_adapter(model, "a", 4, 8)
    optimizer = torch.optim.Adam(adapter_parameters(model, "a").values(), lr=0.01)
    losses = []
    for _ in range(8):
        with torch.autocast("cpu", torch.bfloat16), use_adapter(model, "a"):
            loss = F.cross_entropy(model.logits(model(IDS[:, :-1]))[0].float(), IDS[0, 1:])
        loss.backward()
        assert all(p.grad is not None for p in adapter_parameters(model, "a").values())
        optimizer.step(), optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert torch.equal(logits(model), bare)
    remove_adapter(model, "a")
    assert all(torch.equal(t, state_before[n]) for n, t in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_adapter_leaves_dense_layers(small_model, write_folder, tmp_path, dtype):
    folder = write_folder(small_model(**SIZES), tmp_path)
    model = load_model(folder, dtype, "cpu", quantize=True)
    add_adapter(model, "a", 4, 8, targets=["q_proj", "down_proj"])
    add_adapter(model, "b", 4, 8, targets=["q_proj"])
    for name in ("a", "b"):
        for i, parameter in enumerate(adapter_parameters(model, name).values()):
            parameter.data.copy_(normal(*parameter.shape, seed=i))
    expected = logits(model, "a")
    merge_adapter(model, "a")
    assert (logits(model) - expected).abs().max() < (1e-4 if dtype == torch.float32 else 0.15)
    for merged in (model.model.layers[0].self_attn.q_proj.base, model.model.layers[0].mlp.down_proj):
        assert type(merged) is nn.Linear and merged.weight.dtype == dtype and not merged.weight.requires_grad
    assert isinstance(model.model.layers[0].mlp.up_proj, Nf4Linear)  # had no adapter
    assert isinstance(model.model.layers[0].self_attn.q_proj, LoraLinear)  # still has the other
    with pytest.raises(AssertionError, match="a layer has dense linears"):
        save_nf4(model, folder, tmp_path / "out")


def test_a_merged_checkpoint_is_dense_whatever_was_quantized(small_model, write_folder, tmp_path):
    """Its source's config.json would name the format of weights that are no longer there."""
    transformers = pytest.importorskip("transformers")
    folder = write_folder(small_model(**SIZES), tmp_path / "source")
    save_nf4(load_model(folder, torch.float32, "cpu", quantize=True), folder, tmp_path / "nf4")
    model = load_model(tmp_path / "nf4", torch.float32, "cpu")
    add_adapter(model, "a", 4, 8, targets=["v_proj"])
    for i, parameter in enumerate(adapter_parameters(model, "a").values()):
        parameter.data.copy_(normal(*parameter.shape, seed=i))
    add_adapter(model, "left", 4, 8, targets=["o_proj"])
    expected = logits(model, "a")
    merge_adapter(model, "a")
    dense = load_file(folder / "model.safetensors")
    assert {n: t.shape for n, t in checkpoint_tensors(model).items()} == {n: t.shape for n, t in dense.items()}
    save_merged(model, tmp_path / "nf4", tmp_path / "merged")
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    assert (logits(load_model(tmp_path / "merged", torch.float32, "cpu")) - expected).abs().max() < 1e-4
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert (theirs(IDS).logits - expected).abs().max() < 1e-4
