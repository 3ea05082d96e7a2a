"""The text part of a Gemma 3 and of a Qwen3.5 that also see images, against transformers and PEFT."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from r3lite.core.errors import R3LiteError
from r3lite.models.config_file import config_record
from r3lite.models.lora import adapter_parameters, add_adapter, load_adapter, merge_adapter, save_adapter, set_adapter
from r3lite.models.saving import save_merged
from r3lite.models.text_part import text_name
from r3lite.models.weights import fingerprint, load_model
from tests.errors import raises

transformers = pytest.importorskip("transformers")

GEMMA = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 20,
        "initializer_range": 0.1}  # fmt: skip
GEMMA_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                "image_size": 28, "patch_size": 14}  # fmt: skip
QWEN = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "linear_num_key_heads": 1,
        "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "full_attention_interval": 2, "initializer_range": 0.1}  # fmt: skip
QWEN_VISION = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 64,
               "patch_size": 14, "num_position_embeddings": 16}  # fmt: skip
IDS = torch.arange(7, 57)[None]


@pytest.fixture(scope="module", params=["gemma3", "qwen3_5"])
def folder(request, tmp_path_factory):
    torch.manual_seed(0)
    if request.param == "gemma3":
        config = transformers.Gemma3Config(text_config=GEMMA, vision_config=GEMMA_VISION, mm_tokens_per_image=4)
        model = transformers.Gemma3ForConditionalGeneration(config)
    else:
        config = transformers.Qwen3_5Config(text_config=QWEN, vision_config=QWEN_VISION, tie_word_embeddings=True)
        model = transformers.Qwen3_5ForConditionalGeneration(config)
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    if request.param == "qwen3_5":  # as published ones have them
        save_file({"mtp.norm.weight": torch.ones(64)}, path / "mtp.safetensors", {"format": "pt"})
        names = [*safe_open(path / "model.safetensors", "pt").keys(), "mtp.norm.weight"]
        files = {name: "mtp.safetensors" if name.startswith("mtp") else "weights.safetensors" for name in names}
        (path / "model.safetensors").rename(path / "weights.safetensors")
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return path


def image_text_model(folder):
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def difference(ours, theirs) -> float:
    with torch.no_grad():
        return (ours.logits(ours(IDS)) - theirs(input_ids=IDS).logits).abs().max().item()


def test_logits_are_those_of_the_whole_model_and_the_vision_is_said_to_be_left_out(folder, capsys):
    ours = load_model(folder, torch.float32, "cpu")
    assert "without the model's vision" in capsys.readouterr().err
    assert difference(ours, image_text_model(folder)) < 1e-4
    assert fingerprint(folder)


def test_adapters_fit_peft_both_ways(folder, tmp_path):
    peft = pytest.importorskip("peft")
    ours = load_model(folder, torch.float32, "cpu")
    add_adapter(ours, "a", 4, 8.0, targets=("q_proj", "down_proj"))
    for parameter in adapter_parameters(ours, "a").values():
        parameter.data.normal_(0, 0.05, generator=torch.Generator().manual_seed(1))
    set_adapter(ours, "a")
    save_adapter(ours, "a", tmp_path / "ours", str(folder))
    theirs = peft.PeftModel.from_pretrained(image_text_model(folder), tmp_path / "ours")
    assert difference(ours, theirs) < 1e-4
    theirs.save_pretrained(tmp_path / "theirs")
    reloaded = load_model(folder, torch.float32, "cpu")
    load_adapter(reloaded, "b", tmp_path / "theirs", trainable=False)
    set_adapter(reloaded, "b")
    assert difference(reloaded, theirs) < 1e-4


def test_an_export_is_a_model_of_text_alone(folder, tmp_path):
    ours = load_model(folder, torch.float32, "cpu")
    add_adapter(ours, "a", 4, 8.0)
    merge_adapter(ours, "a")
    save_merged(ours, folder, tmp_path / "out")
    assert config_record(tmp_path / "out").text("model_type") in ("gemma3_text", "qwen3_5_text")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert isinstance(theirs, transformers.Gemma3ForCausalLM | transformers.Qwen3_5ForCausalLM)
    assert difference(ours, theirs) < 1e-4


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),  # transformers 4
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("vision_tower.vision_model.post_layernorm.weight", None),
        ("model.multi_modal_projector.mm_input_projection_weight", None),
        ("model.visual.blocks.0.attn.qkv.weight", None),
        ("mtp.layers.0.self_attn.q_proj.weight", None),
    ],
)
def test_names_of_both_layouts(stored, expected):
    assert text_name(stored) == expected


def test_a_config_without_a_text_part_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3"}))
    with raises(R3LiteError, "model-type-unsupported", "gemma3"):
        load_model(tmp_path, torch.float32, "cpu")
