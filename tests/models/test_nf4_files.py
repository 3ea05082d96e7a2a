"""Files of NF4 weights: saved and loaded they are the same; broken ones and other layouts are refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from r3lite.core.errors import R3LiteError
from r3lite.models import nf4
from r3lite.models.config_file import read_config
from r3lite.models.lora import add_adapter, remove_adapter
from r3lite.models.saving import save_nf4
from r3lite.models.weights import load_model
from tests.errors import raises

IDS = torch.arange(5, 45)[None]
SIZES = {"intermediate_size": 128}  # in_features must be multiples of 64


def same_tensors(a: nn.Module, b: nn.Module) -> bool:
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)


@pytest.mark.parametrize("tied", [True, False])
def test_saved_and_loaded_it_is_equal_to_the_bit(small_model, write_folder, tmp_path, tied):
    folder = write_folder(small_model(**SIZES, tie_word_embeddings=tied), tmp_path / "source", extra_key=[1])
    (folder / "tokenizer.json").write_text('{"a":   1}')
    model = load_model(folder, torch.float32, "cpu", quantize=True)
    add_adapter(model, "a", 4, 8)  # is left out
    out = tmp_path / "out"
    save_nf4(model, folder, out)
    config = json.loads((out / "config.json").read_text())
    layout = {"quant_method": "r3lite_nf4", "block_size": 64, "double_block_size": 256}
    assert config == json.loads((folder / "config.json").read_text()) | {"quantization_config": layout}
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    stored = load_file(out / "model.safetensors")
    up = "model.layers.0.mlp.up_proj"
    assert stored[f"{up}.codes"].shape == (128, 32) and stored[f"{up}.absmax"].shape == (1, 256)
    assert f"{up}.weight" not in stored and "model.layers.0.self_attn.q_proj.bias" in stored
    remove_adapter(model, "a")
    assert read_config(out) == model.config
    for quantized in (False, True):
        reloaded = load_model(out, torch.float32, "cpu", quantize=quantized)
        assert same_tensors(reloaded, model)
        assert torch.equal(reloaded.logits(reloaded(IDS)), model.logits(model(IDS)))
        assert not any(p.requires_grad for p in reloaded.parameters())
    narrow = load_model(out, torch.bfloat16, "cpu")
    assert (
        narrow(IDS).dtype == torch.bfloat16 and narrow.model.layers[0].mlp.up_proj.absmax_scale.dtype == torch.float32
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]
    with raises(R3LiteError, "output-exists"):
        save_nf4(model, folder, out)
    save_nf4(reloaded, out, tmp_path / "copy")  # from one to the next
    assert (tmp_path / "copy" / "config.json").read_bytes() == (out / "config.json").read_bytes()


UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{UP}.codes": None}, rf"missing tensor {UP}\.codes"),
        ({f"{UP}.weight": torch.zeros(128, 64)}, rf"unexpected tensor {UP}\.weight"),
        ({f"{UP}.codes": torch.zeros(128, 33, dtype=torch.uint8)}, rf"{UP}\.codes has shape \[128, 33\]"),
        ({f"{UP}.codes": torch.zeros(128, 32, dtype=torch.int8)}, rf"{UP}\.codes is of type torch\.int8"),
        ({f"{UP}.absmax_scale": torch.zeros(1, dtype=torch.float16)}, r"absmax_scale is of type torch\.float16"),
    ],
)
def test_broken_files_are_explained(small_model, write_folder, tmp_path, change, message):
    folder = write_folder(small_model(**SIZES), tmp_path / "source")
    save_nf4(load_model(folder, torch.float32, "cpu", quantize=True), folder, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = {n: t for n, t in (load_file(file) | change).items() if t is not None}
    save_file(tensors, file)
    with pytest.raises(R3LiteError, match=message):
        load_model(tmp_path / "out", torch.float32, "cpu")


@pytest.mark.parametrize("change", [{"block_size": 32}, {"quant_method": "bitsandbytes"}, {"new": 1}])
def test_other_layouts_are_refused(small_model, write_folder, tmp_path, change):
    folder = write_folder(small_model(), tmp_path, quantization_config=nf4.LAYOUT | change)
    with pytest.raises(R3LiteError, match="quantization_config") as refused:
        load_model(folder, torch.float32, "cpu", quantize=True)
    assert "--quantize nf4" in refused.value.remedy
