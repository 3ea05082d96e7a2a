"""Folders in bitsandbytes' NF4 have the numbers of its formula, to the bit; what is not read is refused by name."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from r3lite.core.errors import R3LiteError
from r3lite.models.config_file import is_nf4, read_config
from r3lite.models.lora import adapter_parameters, add_adapter, merge_adapter, set_adapter
from r3lite.models.saving import save_merged, save_nf4
from r3lite.models.weights import checkpoint_tensors, fingerprint, load_model
from tests.packed_folders import CONFIG, STATE, write_packed

SIZES = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6}  # blocks do not fill their last group
IDS = torch.arange(5, 45)[None]
DENSE = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj", "model.layers.2.mlp.down_proj")


@pytest.fixture
def folders(small_model, write_folder, tmp_path):
    """Makes a folder whose layers are packed, but for those in `dense`, and one with the same numbers in fp32."""

    def make(double: bool = True, dense: tuple[str, ...] = (), **changes):
        model = small_model(**SIZES, **changes)
        packed = write_packed(write_folder, model, tmp_path / "packed", double, dense)
        return packed, write_folder(model, tmp_path / "plain")

    return make


@pytest.mark.parametrize("dense", [(), DENSE], ids=["all", "mixed"])
@pytest.mark.parametrize("double", [True, False], ids=["double", "single"])
def test_numbers_are_those_of_the_formula_to_the_bit(folders, double, dense):
    packed, plain = folders(double, dense, tie_word_embeddings=False)
    expected = load_model(plain, torch.float32, "cpu")
    for quantize in (False, True):  # what is dense stays so
        model = load_model(packed, torch.float32, "cpu", quantize)
        loaded = checkpoint_tensors(model)
        stored = load_file(plain / "model.safetensors")
        assert loaded.keys() == stored.keys() and all(torch.equal(loaded[n], stored[n]) for n in stored)
        assert (model.logits(model(IDS)) - expected.logits(expected(IDS))).abs().max() < 1e-4
        kinds = {n.rsplit(".", 1)[0] for n, _ in model.named_buffers()}
        assert len(kinds) == 21 - len(dense) and not kinds & set(dense)
    assert is_nf4(packed) and read_config(packed) == read_config(plain)
    with pytest.raises(AssertionError, match="dense linears" if dense else "of bitsandbytes is kept as it is"):
        save_nf4(model, packed, packed / "again")


def test_gradients_and_stacks_are_those_of_the_dense_model(folders):
    """Of q_proj, k_proj and v_proj, which are one product, one is dense."""
    models = [load_model(folder, torch.float32, "cpu") for folder in folders(dense=DENSE)]
    gradients = []
    for model in models:
        add_adapter(model, "a", 4, 8)
        set_adapter(model, "a")
        model.logits(model(IDS)).square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in adapter_parameters(model, "a").values()]))
    assert gradients[1].abs().max() > 0 and torch.allclose(*gradients, atol=1e-5 * gradients[1].abs().max().item())


def test_tensors_of_a_weight_may_be_in_several_files(folders):
    packed, plain = folders()
    tensors = load_file(packed / "model.safetensors")
    (packed / "model.safetensors").unlink()
    parts = {"a.safetensors": {}, "b.safetensors": {}}
    for i, (name, tensor) in enumerate(tensors.items()):
        parts[list(parts)[i % 2]][name] = tensor
    for name, part in parts.items():
        save_file(part, packed / name)
    places = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (packed / "model.safetensors.index.json").write_text(json.dumps(places))
    loaded = checkpoint_tensors(load_model(packed, torch.float32, "cpu"))
    stored = load_file(plain / "model.safetensors")
    assert all(torch.equal(loaded[name], stored[name]) for name in stored)


def test_a_merged_folder_is_dense_and_the_fingerprint_is_of_what_is_stored(folders, tmp_path):
    packed, plain = folders()
    model = load_model(packed, torch.float32, "cpu")
    add_adapter(model, "a", 4, 8, targets=["v_proj"])
    merge_adapter(model, "a")  # B is zero
    save_merged(model, packed, tmp_path / "merged")
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in config
    merged, stored = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", plain))
    assert merged.keys() == stored.keys() and all(torch.equal(merged[n], stored[n]) for n in stored)
    packed_fingerprint = fingerprint(packed)
    assert packed_fingerprint and packed_fingerprint != fingerprint(plain) == fingerprint(tmp_path / "merged")
    name = "model.layers.1.mlp.up_proj.weight.nested_absmax"
    tensors = load_file(packed / "model.safetensors")
    save_file(tensors | {name: tensors[name] * 2}, packed / "model.safetensors")
    assert fingerprint(packed) != packed_fingerprint


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"load_in_8bit": True, "load_in_4bit": False}, "load_in_8bit is True"),
        ({"load_in_4bit": None}, "load_in_4bit is None"),
        ({"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type is 'fp4'"),
        ({"bnb_4bit_quant_type": None}, "bnb_4bit_quant_type is None"),  # fp4 is what a config means by that
        ({"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage is 'bfloat16'"),
        ({"quant_method": "gptq", "bits": 4}, "quant_method is 'gptq'"),
        ({"quant_method": "awq", "bits": 4}, "quant_method is 'awq'"),
    ],
)
def test_other_quantized_checkpoints_are_refused_by_name(small_model, write_folder, tmp_path, changes, named):
    folder = write_folder(small_model(), tmp_path, quantization_config=CONFIG | changes)
    with pytest.raises(R3LiteError) as error:
        read_config(folder)
    assert f"quantization_config.{named}" in str(error.value) and "--quantize nf4" in error.value.remedy


UP = "model.layers.1.mlp.up_proj.weight"


def restated(tensor: torch.Tensor, **changes) -> torch.Tensor:
    state = json.loads(bytes(tensor.tolist())) | changes
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("part", "change", "named"),
    [
        (f".{STATE}", lambda t: restated(t, blocksize=128), "blocksize is 128, not 64"),
        (f".{STATE}", lambda t: restated(t, nested_blocksize=128), "nested_blocksize is 128, not 256"),
        (f".{STATE}", lambda t: restated(t, quant_type="fp4"), "quant_type is 'fp4', not 'nf4'"),
        (f".{STATE}", lambda t: restated(t, shape=[192, 320]), "shape is [192, 320], not [320, 192]"),
        (f".{STATE}", lambda t: restated(t, nested_offset="x"), "nested_offset is 'x'"),
        (f".{STATE}", lambda t: t[:-1], "not JSON"),
        (f".{STATE}", lambda t: t + 128, "not JSON"),
        (f".{STATE}", lambda t: t * 1.5, "not JSON"),
        ("", lambda t: t[:-1], f"{UP} has 30719 numbers of type torch.uint8, not 30720 of torch.uint8"),
        ("", lambda t: t.bfloat16(), "torch.bfloat16"),
        (".absmax", lambda t: t.float(), f"{UP}.absmax has 960 numbers of type torch.float32"),
        (".nested_absmax", lambda t: t[:-1], f"{UP}.nested_absmax has 3 numbers"),
        (".nested_quant_map", lambda t: None, f"missing tensor {UP}.nested_quant_map"),
        (f".{STATE}", lambda t: None, f"unexpected tensor {UP}.absmax and 3 more"),
    ],
)  # fmt: skip
def test_broken_tensors_are_explained(folders, part, change, named):
    packed, _ = folders()
    file = packed / "model.safetensors"
    tensors = load_file(file)
    changed = change(tensors[UP + part])
    tensors[UP + part] = None if changed is None else changed.contiguous()
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    with pytest.raises(R3LiteError) as error:
        load_model(packed, torch.float32, "cpu")
    assert named in str(error.value) and error.value.remedy


@pytest.mark.parametrize("double", [True, False], ids=["double", "single"])
def test_bitsandbytes_itself_gives_the_same_numbers(folders, double):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    packed, _ = folders(double)
    stored, compared = load_file(packed / "model.safetensors"), 0
    for name, tensor in checkpoint_tensors(load_model(packed, torch.float32, "cpu")).items():
        parts = {key.removeprefix(f"{name}."): t for key, t in stored.items() if key.startswith(f"{name}.")}
        if parts:
            state = bitsandbytes.functional.QuantState.from_dict(parts, torch.device("cpu"))
            state.dtype = torch.float32  # of what it returns
            assert torch.equal(bitsandbytes.functional.dequantize_4bit(stored[name], state), tensor)
            compared += 1
    assert compared == 21


def test_what_bitsandbytes_quantizes_is_read(small_model, write_folder, tmp_path):
    """Its own 8-bit map and the state as it writes it."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = small_model(**SIZES)
    folder = write_folder(model, tmp_path, quantization_config=CONFIG)
    stored, dense = {}, {}
    for name, parameter in model.named_parameters():
        stored[name] = dense[name] = parameter.detach()
        if ".layers." in name and name.endswith("_proj.weight"):
            stored[name], state = bitsandbytes.functional.quantize_4bit(
                parameter.detach(), quant_type="nf4", compress_statistics=True
            )
            stored |= {f"{name}.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}
            dense[name] = bitsandbytes.functional.dequantize_4bit(stored[name], state)
    save_file({name: tensor.clone() for name, tensor in stored.items()}, folder / "model.safetensors")
    loaded = checkpoint_tensors(load_model(folder, torch.float32, "cpu"))
    assert all(torch.equal(loaded[name], dense[name]) for name in dense)
