"""Layers that read the same x lie one after another in memory, are used as one, and give what each gives by itself."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from r3lite.models import lora
from r3lite.models.nf4 import dequantize, quantize
from r3lite.models.projections import Nf4Linear, Stack, project
from r3lite.models.saving import save_nf4
from r3lite.models.stacks import side_by_side, stacked, stacks
from r3lite.models.weights import load_model

SIZES = {"hidden_size": 128, "intermediate_size": 320}


def test_neighbours_are_one_view_and_others_a_copy():
    parts = stacked([(2, 3), (1, 3), (4, 3)], torch.float32, torch.device("cpu"))
    for i, part in enumerate(parts):
        part.fill_(i)
    joined = side_by_side(parts)
    assert joined[:, 0].tolist() == [0, 0, 1, 2, 2, 2, 2] and joined.data_ptr() == parts[0].data_ptr()
    for scattered in ([parts[1], parts[0]], [parts[0], parts[2]], [parts[0], parts[1].clone()]):
        copy = side_by_side(scattered)
        assert torch.equal(copy, torch.cat(scattered)) and copy.data_ptr() != parts[0].data_ptr()
    assert side_by_side([parts[1]]) is parts[1]


def test_layers_of_one_parent_that_read_the_same_x_are_together():
    paths = ["a.q_proj", "a.k_proj", "a.o_proj", "b.q_proj", "b.up_proj", "q_proj"]
    assert stacks(paths) == [["a.q_proj", "a.k_proj"], ["a.o_proj"], ["b.q_proj"], ["b.up_proj"], ["q_proj"]]


@pytest.mark.parametrize("quantize_it", [False, True])
def test_a_loaded_model_and_its_adapters_are_stacked(small_model, write_folder, tmp_path, quantize_it):
    source = small_model(**SIZES)
    model = load_model(write_folder(source, tmp_path), torch.float32, "cpu", quantize=quantize_it)
    lora.add_adapter(model, "a", 4, 8)
    for i, parameter in enumerate(lora.adapter_parameters(model, "a").values()):  # every B of a fresh one is 0
        parameter.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(i))
    lora.set_adapter(model, "a")
    for layer in model.model.layers:
        for stack in ((layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
                      (layer.mlp.gate_proj, layer.mlp.up_proj)):  # fmt: skip
            bases = [module.base for module in stack]
            tensors = (
                [[b.codes for b in bases], [b.absmax for b in bases]] if quantize_it else [[b.weight for b in bases]]
            )
            tensors += [[module.lora_A["a"] for module in stack]]
            for beside in tensors:
                assert side_by_side(beside).data_ptr() == beside[0].data_ptr()
            A, Bs = Stack(stack).cast(torch.bfloat16)
            assert torch.equal(A, torch.cat([module.lora_A["a"] for module in stack]).bfloat16())
            assert all(torch.equal(B, module.lora_B["a"].bfloat16()) for B, module in zip(Bs, stack, strict=True))
    biases = [getattr(model.model.layers[0].self_attn, f"{name}_proj").base.bias for name in "qkv"]
    assert side_by_side(biases).data_ptr() == biases[0].data_ptr()
    if not quantize_it:
        assert all(torch.equal(p, source.get_parameter(n.replace(".base", ""))) for n, p in model.named_parameters()
                   if "lora" not in n)  # fmt: skip


@pytest.mark.parametrize("targets", [["q_proj", "k_proj", "v_proj"], ["k_proj"], ["q_proj", "v_proj"], []])
@pytest.mark.parametrize("quantize_it", [False, True])
def test_a_stack_gives_what_its_layers_give(small_model, write_folder, tmp_path, targets, quantize_it):
    """Outputs and gradients, against plain products that autograd differentiates."""
    model = load_model(write_folder(small_model(**SIZES), tmp_path), torch.float32, "cpu", quantize=quantize_it)
    attention = model.model.layers[1].self_attn
    if targets:
        lora.add_adapter(model, "a", 4, 8, targets=targets)
        for i, parameter in enumerate(lora.adapter_parameters(model, "a").values()):
            parameter.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(i))
    x, upstream = (torch.randn(5, n, generator=torch.Generator().manual_seed(n)) for n in (128, 128 + 2 * 64))
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    ours = x.clone().requires_grad_()
    plain = x.clone().requires_grad_()
    expected = []
    weights = []
    for layer in layers:
        base = getattr(layer, "base", layer)
        dense = dequantize([base.weight], torch.float32) if isinstance(base, Nf4Linear) else base.weight
        out = F.linear(plain, dense, base.bias)
        if base is not layer:
            pair = [side["a"].detach().clone().requires_grad_() for side in (layer.lora_A, layer.lora_B)]
            out = out + 2 * plain @ pair[0].t() @ pair[1].t()
            weights = [*weights, *pair]
        expected.append(out)
    torch.cat(expected, dim=-1).backward(upstream)
    with lora.use_adapter(model, "a" if targets else None):
        out = project(layers, ours)
        with torch.no_grad():
            assert torch.allclose(project(layers, x), out, atol=1e-6)
    out.backward(upstream)
    assert torch.allclose(out, torch.cat(expected, dim=-1), atol=1e-5)
    assert torch.allclose(ours.grad, plain.grad, atol=1e-5)
    grads = [side["a"].grad for layer in layers if hasattr(layer, "base") for side in (layer.lora_A, layer.lora_B)]
    assert len(grads) == len(weights) and all(torch.allclose(a, w.grad, atol=1e-5) for a, w in zip(grads, weights))


@pytest.mark.parametrize("rows", [(256, 64, 64), (40, 8, 8)])
def test_stacked_nf4_weights_are_those_of_each(rows):
    """Blocks of 64 by 256 of them fill whole groups in the first case, and leave gaps in the second."""
    generator = torch.Generator().manual_seed(0)
    packed = [quantize(torch.randn(n, 256, generator=generator) * (i + 1)) for i, n in enumerate(rows)]
    together = torch.cat([dequantize([weight], torch.bfloat16) for weight in packed])
    assert torch.equal(dequantize(packed, torch.bfloat16), together)


def test_a_folder_whose_absmax_mean_is_one_number_is_read(small_model, write_folder, tmp_path):
    """So it was written before weights were stacked."""
    folder = write_folder(small_model(**SIZES), tmp_path / "dense")
    model = load_model(folder, torch.float32, "cpu", quantize=True)
    save_nf4(model, folder, tmp_path / "nf4")
    file = tmp_path / "nf4" / "model.safetensors"
    tensors = {k: v[0].clone() if k.endswith(".absmax_mean") else v for k, v in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    ids = torch.arange(20)[None]
    assert torch.equal(load_model(tmp_path / "nf4", torch.float32, "cpu")(ids), model(ids))
