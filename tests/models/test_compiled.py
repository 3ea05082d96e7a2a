"""Compiled NF4 weights against those that are not, how often they are compiled, and a missing compiler."""

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._inductor import cpp_builder

from r3lite.assembly import policy
from r3lite.core.errors import R3LiteError
from r3lite.core.grant import Grant, Memory
from r3lite.models import activation_checkpointing, compiled, nf4
from r3lite.models.lora import adapter_parameters, add_adapter, set_adapter
from r3lite.models.weights import load_model

CPU = torch.device("cpu")


@pytest.fixture
def make(small_model, write_folder, tmp_path):
    """Makes the same model again and again, with an adapter that is on and whose B is not zero."""

    def model_with_adapter(
        dtype, quantize=False, targets=("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    ):
        folder = tmp_path / "model"
        if not folder.exists():
            write_folder(small_model(intermediate_size=128), folder)
        model = load_model(folder, dtype, CPU, quantize=quantize)
        add_adapter(model, "a", 4, 8.0, targets=targets)
        generator = torch.Generator().manual_seed(1)
        for parameter in adapter_parameters(model, "a").values():
            parameter.data.normal_(0, 0.05, generator=generator)
        set_adapter(model, "a")
        return model

    return model_with_adapter


def compiled_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def off(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """How far hidden states [N, C] are from what they should be, of the latter's norm, in the worst row."""
    return float(((ours.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)).max())


@pytest.mark.slow
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_nf4_weights(compiler, dtype, bound):
    """Of several shapes, alone and together, whether the last group of their absmax is full or not."""
    dequantize = compiled._Dequantizer()
    for shapes in ([(80, 1024)], [(16, 1024), (32, 1024)], [(70, 512), (80, 512)]):
        weights = [nf4.quantize(torch.randn(*shape)) for shape in shapes]
        expected = nf4.dequantize(weights, dtype)
        dense = dequantize(weights, dtype)
        assert dense.dtype == dtype and torch.allclose(dense, expected, rtol=bound, atol=0)
    assert 0 < compiled_graphs() <= 2  # one group is another case than several


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [0, 3])
def test_gradients(compiler, make, recompute):
    """Of NF4 weights that are compiled, also in layers that are recomputed."""

    def gradients(model):
        activation_checkpointing.enable(model, Grant(Memory(recompute_layers=recompute)))
        model(torch.arange(20)[None]).square().mean().backward()
        grads = [parameter.grad for parameter in adapter_parameters(model, "a").values()]
        model.zero_grad()
        return torch.cat([grad.flatten() for grad in grads])[None]

    model = make(torch.float32, quantize=True)
    expected = gradients(model)
    compiled.enable(model)
    assert model.model.layers[0].mlp.up_proj.base.dequantize is not nf4.dequantize
    assert off(gradients(model), expected) <= 1e-5 and compiled_graphs() > 0


def test_a_compilation_that_fails_tells_what_helps(monkeypatch, small_model):
    """A run that was killed while it compiled left half a file in PyTorch's cache, and the next one a traceback."""

    def fail(model):
        raise TorchDynamoException("ImportError: x.so: file too short\nmore of it")

    monkeypatch.setattr(policy.compiled, "missing_compiler", lambda device: None)
    monkeypatch.setattr(policy.compiled, "enable", fail)
    with pytest.raises(R3LiteError, match=r"--compile failed: ImportError: x.so: file too short\n") as raised:
        policy._compile(small_model(), torch.device("cuda"), nf4=True)
    assert "TORCHINDUCTOR_CACHE_DIR" in raised.value.remedy


def test_without_a_compiler_one_line_says_so():
    with inductor.patch({"cpp.cxx": (None, "no-such-compiler"), "force_disable_caches": True}):
        if hasattr(cpp_builder.get_cpp_compiler, "cache_clear"):  # up to some version of PyTorch
            cpp_builder.get_cpp_compiler.cache_clear()
        reason = compiled.missing_compiler(CPU)
    assert reason and "\n" not in reason


@pytest.mark.parametrize(("device", "nf4"), [("cpu", True), ("cuda", False)])
def test_what_is_not_compiled_is_said(capsys, small_model, device, nf4):
    """A CPU makes NF4 weights dense a tile at a time, which is faster; of dense weights nothing is compiled."""
    policy._compile(small_model(), torch.device(device), nf4)
    stderr = capsys.readouterr().err
    assert stderr.startswith("warning: --compile has no effect: it needs an NF4 base")
    assert stderr.count("\n") == 1
