"""Precision: what `auto` means, and what happens to gradients that are not finite."""

import re
import shutil

import pytest
import torch

from r3lite.core.errors import R3LiteError
from r3lite.devices import precision
from r3lite.devices.precision import MAX_SKIPS_IN_A_ROW, NonFiniteGradients, Precision
from r3lite.models.hooks import explain_overflow
from tests.errors import raises

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", precision.DTYPES)
@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_an_explicit_dtype_is_never_overruled(name, device):
    assert precision.resolve_dtype(name, torch.device(device)) == precision.DTYPES[name]


PROCESSORS = {
    "AMD EPYC 9754": ("AuthenticAMD", "avx512_bf16", torch.bfloat16),
    "AMD EPYC 7713": ("AuthenticAMD", "avx2", torch.float32),
    "Intel Xeon": ("GenuineIntel", "avx512_bf16 amx_bf16", torch.bfloat16),
    "Intel Xeon of a virtual machine without AMX": ("GenuineIntel", "avx512_bf16", torch.float32),
    "Neoverse-N2": ("ARM", "bf16", torch.bfloat16),
}


@pytest.mark.parametrize("has_capabilities", [True, False])
@pytest.mark.parametrize("name", PROCESSORS)
def test_on_a_cpu_auto_is_bf16_where_the_processor_is_fast_in_it(monkeypatch, tmp_path, name, has_capabilities):
    """From PyTorch's capabilities, or from /proc/cpuinfo where PyTorch is too old for them."""
    vendor, features, dtype = PROCESSORS[name]
    capabilities = {"cpu_name": name, "avx512_bf16": False} | dict.fromkeys(features.split(), True)
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"vendor_id\t: {vendor}\nmodel name\t: {name}\nflags\t: fpu {features} sse2\n")
    monkeypatch.setattr(precision.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(precision, "CPU_INFO", cpuinfo)
    answer = capabilities if has_capabilities else {}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: answer, raising=False)
    assert precision.resolve_dtype("auto", CPU) == dtype


@pytest.mark.parametrize(("has_bf16", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
def test_on_a_card_auto_is_bf16_or_fp16_and_never_fp32(monkeypatch, has_bf16, dtype):
    supported = {False: has_bf16, True: True}  # every card emulates it
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: supported[including_emulation]
    )
    assert precision.resolve_dtype("auto", torch.device("cuda")) == dtype


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_an_error_with_a_remedy():
    with raises(R3LiteError, "device-absent", "cuda") as error:
        precision.resolve_device("cuda")
    assert "pytorch.org/get-started" in error.value.remedy


def test_a_card_without_a_pytorch_that_can_use_it_is_told(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert precision.resolve_device("auto") == CPU
    assert "NVIDIA GPU" in (stderr := capsys.readouterr().err)
    assert "https://pytorch.org/get-started/locally/" in stderr
    precision.resolve_device("cpu")  # asked for: nothing to warn of
    assert not capsys.readouterr().err


def step(p: Precision, weight: torch.nn.Parameter, optimizer, loss: torch.Tensor, max_norm: float = 1e9):
    p.backward(loss)
    return p.step(optimizer, [weight], max_norm)


@pytest.mark.parametrize("dtype", precision.DTYPES.values())
def test_a_step_clips_to_the_norm_and_clears_the_gradients(dtype):
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    # The gradient is (3, 4), of norm 5; clipped to norm 1 it is (0.6, 0.8), in fp16 after the scale is taken out.
    norm, skipped = step(Precision(dtype, CPU), weight, optimizer, 3 * weight[0] + 4 * weight[1], max_norm=1.0)
    assert norm == pytest.approx(5)
    assert not skipped
    assert weight.tolist() == pytest.approx([-0.6, -0.8], abs=1e-6)
    assert weight.grad is None


@pytest.mark.parametrize("dtype", precision.DTYPES.values())
def test_every_dtype_learns_on_the_cpu(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 8, generator=generator)
    y = x @ torch.randn(8, 4, generator=generator)
    weight = torch.nn.Parameter(torch.zeros(4, 8))
    optimizer, p, losses = torch.optim.AdamW([weight], lr=0.05, weight_decay=0), Precision(dtype, CPU), []
    for _ in range(150):
        with p.autocast():
            out = torch.nn.functional.linear(x, weight)
        assert out.dtype == dtype
        loss = (out.float() - y).pow(2).mean()
        step(p, weight, optimizer, loss)
        losses.append(loss.item())
    assert losses[-1] < 0.01 * losses[0]
    assert p.skipped <= (2 if dtype == torch.float16 else 0)  # until the scale has come down to fit


def test_a_scaler_lets_fp16_see_gradients_that_it_could_not_hold():
    """Without it gradients below 6e-8 are zero in fp16 and training stands still with no error."""
    small = 1e-8
    weight = torch.nn.Parameter(torch.zeros(1))
    bare = (weight.half() * small).sum()
    bare.backward()
    assert weight.grad.item() == 0
    weight.grad = None
    half = weight.half()
    norm, _ = step(Precision(torch.float16, CPU), weight, torch.optim.SGD([weight], lr=1.0), half.float().sum() * small)
    assert norm == pytest.approx(small, rel=1e-2)


def test_in_fp16_an_overflow_is_skipped_counted_and_halves_the_scale():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    p = Precision(torch.float16, CPU)
    norm, skipped = step(p, weight, optimizer, (weight.half() * 6e4).float().sum() * 1e3)
    assert skipped
    assert not torch.isfinite(torch.tensor(norm))
    assert weight.item() == 1
    assert not optimizer.state  # not even its moments
    assert (p.skipped, p.skipped_in_a_row, p.scaler.get_scale()) == (1, 1, 2.0**15)
    _, skipped = step(p, weight, optimizer, weight.sum())
    assert not skipped
    assert weight.item() < 1
    assert (p.skipped, p.skipped_in_a_row) == (1, 0)


def test_in_fp16_overflow_without_end_stops_the_run_with_a_remedy():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer, p = torch.optim.AdamW([weight]), Precision(torch.float16, CPU)
    for _ in range(MAX_SKIPS_IN_A_ROW - 1):
        step(p, weight, optimizer, weight.sum() * float("inf"))
    with raises(NonFiniteGradients, "fp16-overflow") as error:
        step(p, weight, optimizer, weight.sum() * float("inf"))
    assert "--dtype" in error.value.remedy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_without_a_scaler_bad_gradients_stop_the_run_before_they_reach_a_weight(dtype, bad):
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer, p = torch.optim.AdamW([weight]), Precision(dtype, CPU)
    with raises(NonFiniteGradients, "gradients-not-finite"):
        step(p, weight, optimizer, weight.sum() * bad)
    assert weight.item() == 1
    assert not p.changed_weights


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dtype": 3}, "dtype is 3, not text"),
        ({"device": None}, "device is missing"),
        ({"skipped": "2"}, "skipped is '2'"),
        ({"skipped_in_a_row": -1}, "skipped_in_a_row is -1"),
        ({"scaler": None}, "scaler.scale is missing"),
        ({"scaler": [1]}, "scaler is [1], not a JSON object"),
        ({"scaler": {"scale": 0}}, "scaler.scale is 0, not a finite number above 0"),
    ],
)
def test_a_state_of_wrong_types_is_refused(changed, message):
    """They ended in a KeyError or a TypeError."""
    p = Precision(torch.float16, CPU)
    with pytest.raises(R3LiteError, match=re.escape(message)):
        p.load_state_dict(p.state_dict() | changed)


def test_its_state_is_json_and_goes_on_where_it_was():
    import json

    weight = torch.nn.Parameter(torch.ones(1))
    optimizer, p = torch.optim.AdamW([weight]), Precision(torch.float16, CPU)
    for loss in (weight.sum() * float("inf"), weight.sum(), weight.sum()):
        step(p, weight, optimizer, loss)
    resumed = Precision(torch.float16, CPU)
    resumed.load_state_dict(json.loads(json.dumps(p.state_dict())))
    step(resumed, weight, optimizer, weight.sum())
    step(p, weight, optimizer, weight.sum())
    assert resumed.state_dict() == p.state_dict()
    with raises(R3LiteError, "checkpoint-precision-differs", "--dtype"):
        Precision(torch.float32, CPU).load_state_dict(p.state_dict())


def test_an_overflow_is_explained_by_the_name_of_the_layer(small_model):
    model = small_model()
    ids = torch.arange(8)[None]
    assert explain_overflow(model, lambda: model(ids)).startswith("no layer overflowed")
    model.model.layers[1].mlp.down_proj.weight.mul_(1e6)
    half = model.half()
    assert "model.layers.1 was the first layer to give inf or nan" in explain_overflow(half, lambda: half(ids))
