"""The files of an adapter: what is saved, and what is refused."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from r3lite.errors import R3LiteError
from r3lite.models.lora import add_adapter, load_adapter, save_adapter


def test_what_is_saved(small_model, tmp_path):
    model = small_model()
    add_adapter(model, "a", 8, 16, 0.1, ["v_proj", "q_proj", "down_proj"])
    save_adapter(model, "a", tmp_path, "Qwen/Qwen2.5-0.5B-Instruct")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "q_proj", "v_proj"]
    assert config["base_model_name_or_path"] == "Qwen/Qwen2.5-0.5B-Instruct"
    facts = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "lora_dropout": 0.1}
    facts |= {"bias": "none", "use_rslora": False, "use_dora": False, "fan_in_fan_out": False}
    assert {key: config[key] for key in facts} == facts
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_slice("base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight").get_shape() == [8, 64]
        assert file.get_slice("base_model.model.model.layers.2.mlp.down_proj.lora_B.weight").get_shape() == [64, 8]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"layers_to_transform": [1]}, "layers_to_transform"),
        ({"feature_of_next_year": {"on": 1}}, "feature_of_next_year"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"target_modules": None}, "target_modules is None"),
        ({"target_modules": ".*proj"}, r"target_modules is '\.\*proj'"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules has lm_head"),
        ({"target_modules": ["q_proj", "k_proj"]}, "lacks the tensor .*k_proj.lora_A"),
        ({"r": 4}, r"\[8, 64\], not \[4, 64\]"),
        ({"r": "8"}, "r is '8'"),
        ({"lora_alpha": None}, "lora_alpha is None"),
    ],
)
def test_adapters_that_are_not_understood_are_refused(small_model, tmp_path, change, message):
    """PEFT loads an adapter without target_modules in silence and its logits are wrong; here each is named."""
    model = small_model()
    add_adapter(model, "a", 8, 16, targets=["q_proj"])
    save_adapter(model, "a", tmp_path, "x")
    config = json.loads((tmp_path / "adapter_config.json").read_text()) | change
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(R3LiteError, match=message):
        load_adapter(model, "b", tmp_path, trainable=False)
    assert list(model.lora.configs) == ["a"]


def test_files_that_do_not_fit_are_refused(small_model, tmp_path):
    model = small_model()
    with pytest.raises(R3LiteError, match="no adapter can be read"):
        load_adapter(model, "b", tmp_path, trainable=False)
    add_adapter(model, "a", 8, 16, targets=["q_proj"])
    save_adapter(model, "a", tmp_path, "x")
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"base_model.model.lm_head.weight": torch.zeros(1)}, file)
    with pytest.raises(R3LiteError, match=r"unexpected tensor base_model\.model\.lm_head\.weight"):
        load_adapter(model, "b", tmp_path, trainable=False)
    save_file({k: t for k, t in tensors.items() if k != KEY}, file)
    with pytest.raises(R3LiteError, match=f"lacks the tensor {KEY}"):
        load_adapter(model, "b", tmp_path, trainable=False)
    file.write_bytes(b"\0" * 100)
    with pytest.raises(R3LiteError, match="cannot be read"):
        load_adapter(model, "b", tmp_path, trainable=False)
    file.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(R3LiteError, match=r"has no adapter_model\.safetensors"):
        load_adapter(model, "b", tmp_path, trainable=False)
    with pytest.raises(R3LiteError, match="lora_targets has embed_tokens"):
        add_adapter(model, "c", 8, 16, targets=["embed_tokens"])
