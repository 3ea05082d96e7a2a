"""Compiled layers and NF4 weights against those that are not, how often they are compiled, and a missing compiler."""

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
from r3lite.models.kv_cache import KVCache, Prefill
from r3lite.models.lora import adapter_parameters, add_adapter, set_adapter, use_adapter
from r3lite.models.weights import load_model
from r3lite.rollout.decoder import Decoder

CPU = torch.device("cpu")


@pytest.fixture
def make(small_model, write_folder, tmp_path):
    """Makes the same model again and again, with an adapter that is on and whose B is not zero."""

    def made(dtype, quantize=False, targets=("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")):
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

    return made


def compiled_graphs() -> int:
    return counters["stats"]["unique_graphs"]


@torch.no_grad()
def passes(model, lengths=(1, 5, 30)) -> torch.Tensor:
    """Hidden states of rows, of a prefill into a cache and of decode steps after it, all below one another."""
    found = [model(torch.arange(n)[None]) for n in lengths]
    found.append(model(torch.arange(2 * lengths[-1]).view(2, -1)))
    dtype, config = model.head_weight.dtype, model.config
    cache = KVCache(config.num_hidden_layers, 3, config.num_key_value_heads, config.head_dim, dtype, CPU)
    prefill = Prefill(cache, [(row, list(range(n))) for row, n in enumerate((lengths[-1], 4, 2))])
    found.append(model(prefill.tokens, prefill))
    decoder = Decoder(model, cache)
    found += [decoder(list(range(rows))) for rows in (3, 3, 2, 1)]
    return torch.cat([states.flatten(0, -2) for states in found])


def off(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """How far hidden states [N, C] are from what they should be, of the latter's norm, in the worst row."""
    return float(((ours.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)).max())


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [False, True])
def test_hidden_states_in_fp32(compiler, make, quantize):
    model = make(torch.float32, quantize)
    expected = passes(model)
    with use_adapter(model, None):
        bare = passes(model)
    compiled.enable(model)
    assert 0 < off(passes(model), expected) <= 1e-5
    with use_adapter(model, None):
        assert off(passes(model), bare) <= 1e-5


@pytest.mark.slow
def test_hidden_states_in_bf16_are_no_farther_from_those_in_fp32(compiler, make):
    """Both round, in other places: what is compiled keeps fp32 between operations that it makes one."""
    model, exact = make(torch.bfloat16), make(torch.bfloat16).float()
    before, right = passes(model), passes(exact)
    compiled.enable(model)
    after = passes(model)
    assert off(after, right) <= 1.25 * off(before, right) <= 0.05


@pytest.mark.slow
def test_no_length_is_compiled_by_itself(compiler, make):
    """One row, and any number of rows; in bf16 on a CPU few rows as well, whose adapters are in fp32."""
    for dtype, most in ((torch.float32, 2), (torch.bfloat16, 3)):
        torch._dynamo.reset()
        counters.clear()
        model = make(dtype)
        compiled.enable(model)
        assert compiled_graphs() == 2 * most + 1  # two functions, and the logits of one row
        for lengths in ((1, 2, 3), (7, 8, 9), (16, 17, 64), (33, 100, 140)):
            states = passes(model, lengths)
            with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):  # as a run does
                for rows in lengths:
                    model.head_product(states[:rows], model.head_weight)
        assert compiled_graphs() == 2 * most + 1


@pytest.mark.parametrize("width", [64, 4096, 4864])  # the last one's sums are of two pieces
def test_the_sums_of_one_row_are_its_product(width):
    generator = torch.Generator().manual_seed(width)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((1, width), (48, width), (48,)))
    exact = x.double() @ weight.double().t() + bias.double()
    assert off(compiled._product(x, weight, bias), exact) <= 1e-6
    assert off(compiled._product(x, weight), exact - bias.double()) <= 1e-6
    halves = x.bfloat16(), weight.bfloat16(), bias.bfloat16()
    exact = halves[0].double() @ halves[1].double().t() + halves[2].double()
    found = compiled._product(*halves)
    assert found.dtype == torch.bfloat16 and torch.equal(found, exact.bfloat16())  # rounded once, at the end


@pytest.mark.slow
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_the_logits_of_a_decode_step(compiler, make, dtype, bound):
    model = make(dtype)
    states = torch.randn(3, model.config.hidden_size).to(dtype)
    with torch.no_grad():
        expected = [model.head_product(rows, model.head_weight) for rows in (states[:1], states)]
        compiled.enable(model)
        assert compiled_graphs() == 2 * (2 if dtype == torch.float32 else 3) + 1
        found = [model.head_product(rows, model.head_weight) for rows in (states[:1], states)]
    assert all(off(ours, theirs) <= bound for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.slow
def test_a_layer_in_tiles(compiler, make):
    model = make(torch.float32)
    activation_checkpointing.enable(model, Grant(Memory(mlp_tile=7)))
    expected = passes(model)
    compiled.enable(model)
    assert 0 < off(passes(model), expected) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_nf4_weights(compiler, dtype, bound):
    """Of several shapes, alone and together, whether the last group of their absmax is full or not."""
    dequantize = compiled._Dequantizer()
    for shapes in ([(80, 1024)], [(16, 1024), (32, 1024)], [(70, 512), (80, 512)]):
        weights = [nf4.quantize(torch.randn(*shape)) for shape in shapes]
        expected = nf4.dequantize(weights, dtype)
        found = dequantize(weights, dtype)
        assert found.dtype == dtype and torch.allclose(found, expected, rtol=bound, atol=0)
    assert compiled_graphs() <= 2  # one group is another case than several


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [0, 3])
def test_gradients(compiler, make, recompute):
    """A pass with gradients is not compiled, but for its NF4 weights and the first run of a recomputed layer."""

    def gradients(model):
        activation_checkpointing.enable(model, Grant(Memory(recompute_layers=recompute)))
        model(torch.arange(20)[None]).square().mean().backward()
        found = [parameter.grad for parameter in adapter_parameters(model, "a").values()]
        model.zero_grad()
        return torch.cat([grad.flatten() for grad in found])[None]

    model = make(torch.float32, quantize=True)
    expected = gradients(model)
    compiled.enable(model)
    assert off(gradients(model), expected) <= 1e-5


@pytest.mark.slow
def test_dropout_is_not_compiled(compiler, make):
    model = make(torch.float32)
    compiled.enable(model)
    layer = model.model.layers[0]
    assert compiled._can_run(layer.train(), torch.zeros(1, 2, 64))
    model.lora.configs["a"] = type(model.lora.configs["a"])(4, 8.0, dropout=0.5)
    assert not compiled._can_run(layer, torch.zeros(1, 2, 64))
    assert compiled._can_run(layer.eval(), torch.zeros(1, 2, 64))


def test_a_compilation_that_fails_tells_what_helps(monkeypatch, small_model):
    """A run that was killed while it compiled left half a file in PyTorch's cache, and the next one a traceback."""

    def fail(model):
        raise TorchDynamoException("ImportError: x.so: file too short\nmore of it")

    monkeypatch.setattr(policy.compiled, "missing_compiler", lambda device: None)
    monkeypatch.setattr(policy.compiled, "enable", fail)
    with pytest.raises(R3LiteError, match=r"--compile failed: ImportError: x.so: file too short\n") as raised:
        policy._compile(small_model(), CPU, nf4=False)
    assert "TORCHINDUCTOR_CACHE_DIR" in raised.value.remedy


def test_without_a_compiler_one_line_says_so_and_the_model_is_left_as_it_is(capsys, small_model):
    model = small_model()
    with inductor.patch({"cpp.cxx": (None, "no-such-compiler"), "force_disable_caches": True}):
        if hasattr(cpp_builder.get_cpp_compiler, "cache_clear"):  # up to some version of PyTorch
            cpp_builder.get_cpp_compiler.cache_clear()
        policy._compile(model, CPU, nf4=False)
    told = capsys.readouterr().err
    assert told.startswith("warning: nothing is compiled in spite of --compile: ") and told.count("\n") == 1
    assert all(layer.compiled is None for layer in model.model.layers)
