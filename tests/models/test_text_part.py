"""The text part of a Gemma 3 that also sees images, against transformers and PEFT."""

import json

import pytest
import torch

from r3lite.core.errors import R3LiteError
from r3lite.models.config_file import config_record
from r3lite.models.lora import adapter_parameters, add_adapter, load_adapter, merge_adapter, save_adapter, set_adapter
from r3lite.models.saving import save_merged
from r3lite.models.text_part import text_name
from r3lite.models.weights import fingerprint, load_model
from tests.errors import raises

transformers = pytest.importorskip("transformers")

TEXT = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 20,
        "initializer_range": 0.1}  # fmt: skip
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}  # fmt: skip
IDS = torch.arange(7, 57)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.Gemma3Config(text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4)
    model = transformers.Gemma3ForConditionalGeneration(config)
    path = tmp_path_factory.mktemp("gemma3")
    model.save_pretrained(path)
    return path


def whole(folder):
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def difference(ours, theirs) -> float:
    with torch.no_grad():
        return (ours.logits(ours(IDS)) - theirs(input_ids=IDS).logits).abs().max().item()


def test_logits_are_those_of_the_whole_model_and_the_vision_is_said_to_be_left_out(folder, capsys):
    ours = load_model(folder, torch.float32, "cpu")
    assert "without the model's vision" in capsys.readouterr().err
    assert difference(ours, whole(folder)) < 1e-4
    assert fingerprint(folder)


def test_adapters_fit_peft_both_ways(folder, tmp_path):
    peft = pytest.importorskip("peft")
    ours = load_model(folder, torch.float32, "cpu")
    add_adapter(ours, "a", 4, 8.0, targets=("q_proj", "down_proj"))
    for parameter in adapter_parameters(ours, "a").values():
        parameter.data.normal_(0, 0.05, generator=torch.Generator().manual_seed(1))
    set_adapter(ours, "a")
    save_adapter(ours, "a", tmp_path / "ours", str(folder))
    theirs = peft.PeftModel.from_pretrained(whole(folder), tmp_path / "ours")
    assert difference(ours, theirs) < 1e-4
    theirs.save_pretrained(tmp_path / "theirs")
    again = load_model(folder, torch.float32, "cpu")
    load_adapter(again, "b", tmp_path / "theirs", trainable=False)
    set_adapter(again, "b")
    assert difference(again, theirs) < 1e-4


def test_an_export_is_a_model_of_text_alone(folder, tmp_path):
    ours = load_model(folder, torch.float32, "cpu")
    add_adapter(ours, "a", 4, 8.0)
    merge_adapter(ours, "a")
    save_merged(ours, folder, tmp_path / "out")
    assert config_record(tmp_path / "out").text("model_type") == "gemma3_text"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert isinstance(theirs, transformers.Gemma3ForCausalLM)
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
    ],
)
def test_names_of_both_layouts(stored, expected):
    assert text_name(stored) == expected


def test_a_config_without_a_text_part_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3"}))
    with raises(R3LiteError, "model-type-unsupported", "gemma3"):
        load_model(tmp_path, torch.float32, "cpu")
