"""The files of an adapter: what is saved, and what is refused."""

import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from r3lite.core.errors import R3LiteError
from r3lite.models.lora import (
    IGNORED_KEYS,
    USED_KEYS,
    add_adapter,
    load_adapter,
    read_adapter_config,
    read_base,
    save_adapter,
)
from tests.errors import raises


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
        ({"feature_of_next_year": {"on": 1}}, "feature_of_next_year"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"target_modules": None}, "target_modules is missing"),
        ({"target_modules": []}, "target_modules is empty"),
        ({"target_modules": ["q_proj", "k_proj"]}, r"target_modules has k_proj, but adapter_model\.safetensors has no"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "target_modules has embed_tokens, but"),
        ({"r": 4}, r"\[8, 64\], not \[4, 64\]"),
        ({"r": "8"}, "r is '8'"),
        ({"r": True}, "r is True"),
        ({"r": 0}, "r is 0"),
        ({"lora_alpha": None}, "lora_alpha is missing"),
        ({"lora_alpha": 0}, "lora_alpha is 0, not a finite number above 0"),
        ({"lora_alpha": -16}, "lora_alpha is -16"),
        ({"lora_alpha": "16"}, "lora_alpha is '16'"),
        ({"lora_alpha": 1e300}, r"lora_alpha is 1e\+300"),
        ({"lora_dropout": 1}, "lora_dropout is 1"),
        ({"lora_dropout": -0.1}, r"lora_dropout is -0\.1"),
        ({"lora_dropout": "0"}, "lora_dropout is '0'"),
        ({"use_rslora": "false"}, "use_rslora is 'false', not true or false"),
        ({"target_modules": [["q_proj"]]}, "target_modules is .*, not a list of texts"),
        ({"bias": None, "peft_type": ["LORA"]}, r"peft_type is \['LORA'\]"),
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


def test_what_is_adapted_in_some_layers_only_is_named(small_model, tmp_path):
    """The tensors decide, whatever way PEFT has to choose layers."""
    model = small_model()
    add_adapter(model, "a", 8, 16, targets=["q_proj"])
    save_adapter(model, "a", tmp_path, "x")
    config = json.loads((tmp_path / "adapter_config.json").read_text()) | {"layers_to_transform": [1, 2]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    load_adapter(model, "all", tmp_path, trainable=False)
    file = tmp_path / "adapter_model.safetensors"
    save_file({key: tensor for key, tensor in load_file(file).items() if ".layers.0." not in key}, file)
    with raises(R3LiteError, "adapter-keys", KEY) as refusal:
        load_adapter(model, "b", tmp_path, trainable=False)
    assert refusal.value.remedy.startswith("It adapts q_proj. r3lite adapts a projection in every layer or in none.")


def test_the_plan_reads_the_projections_of_the_tensors(small_model, tmp_path):
    model = small_model()
    add_adapter(model, "a", 8, 16, targets=["v_proj", "up_proj"])
    save_adapter(model, "a", tmp_path, "x")
    config = json.loads((tmp_path / "adapter_config.json").read_text()) | {"target_modules": "anything"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert read_adapter_config(tmp_path).targets == ("v_proj", "up_proj")


def test_every_key_that_peft_writes_is_known_or_refused_if_it_is_set(small_model, tmp_path):
    """A key of a later version of PEFT is refused in the same way."""
    peft = pytest.importorskip("peft")
    model = small_model()
    add_adapter(model, "a", 8, 16, targets=["q_proj"])
    save_adapter(model, "a", tmp_path, "x")
    saved_config = json.loads((tmp_path / "adapter_config.json").read_text())
    defaults = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj"]).to_dict() | {"target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(defaults, default=str))
    assert read_adapter_config(tmp_path).targets == ("q_proj",)
    unsupported = defaults.keys() - {*USED_KEYS, *IGNORED_KEYS}
    assert {"alpha_pattern", "fan_in_fan_out", "layer_replication", "lora_bias", "use_dora"} <= unsupported
    for key in unsupported:
        (tmp_path / "adapter_config.json").write_text(json.dumps(saved_config | {key: ["x"]}))
        with pytest.raises(R3LiteError, match=rf"{key} is \['x'\], which r3lite does not support"):
            read_adapter_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "not a JSON object"),
        ('{"lora_alpha": NaN}', "NaN is not a JSON number"),
        ('{"lora_alpha": Infinity}', "Infinity is not a JSON number"),
        ("[" * 200_000, "nested more than"),
        ('{"r": ' + "1" * 5000 + "}", "too many digits"),
    ],
)
def test_configs_that_are_not_json_are_refused(tmp_path, text, message):
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(R3LiteError, match=rf"adapter_config\.json: .*{message}"):
        read_adapter_config(tmp_path)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(8, 64, dtype=torch.int32),
        torch.full((8, 64), torch.nan),
        torch.zeros(8, 64, dtype=torch.float64).index_fill_(0, torch.tensor([3]), 1e300),  # infinite as fp32
        torch.full((8, 64), -torch.inf, dtype=torch.bfloat16),
        torch.zeros(8, 64, dtype=torch.bool),
    ],
)
def test_weights_that_are_not_finite_floats_are_refused(small_model, tmp_path, tensor):
    model = small_model()
    add_adapter(model, "a", 8, 16, targets=["q_proj"])
    save_adapter(model, "a", tmp_path, "x")
    file = tmp_path / "adapter_model.safetensors"
    save_file(load_file(file) | {KEY: tensor}, file)
    with raises(R3LiteError, "adapter-not-finite", KEY):
        load_adapter(model, "b", tmp_path, trainable=False)


def test_the_fingerprint_of_the_base_goes_with_the_weights(small_model, tmp_path):
    model = small_model()
    add_adapter(model, "a", 8, 16)
    save_adapter(model, "a", tmp_path / "with", "some/base", "0123456789abcdef")
    save_adapter(model, "a", tmp_path / "without", "some/base")
    assert read_base(tmp_path / "with") == ("some/base", "0123456789abcdef")
    assert read_base(tmp_path / "without") == ("some/base", None)
    with_it, without = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("with", "without"))
    assert with_it.keys() == without.keys() and all(torch.equal(with_it[k], without[k]) for k in without)
    load_adapter(model, "b", tmp_path / "with", trainable=False)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_pipes_do_not_hang(small_model, tmp_path, name):
    model = small_model()
    add_adapter(model, "a", 8, 16)
    save_adapter(model, "a", tmp_path, "x")
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with raises(R3LiteError, "not-a-file", name, "pipe or device"):
        load_adapter(model, "b", tmp_path, trainable=False)


def test_files_that_do_not_fit_are_refused(small_model, tmp_path):
    model = small_model()
    with raises(R3LiteError, "file-unreadable", "adapter_config.json"):
        load_adapter(model, "b", tmp_path, trainable=False)
    add_adapter(model, "a", 8, 16, targets=["q_proj"])
    save_adapter(model, "a", tmp_path, "x")
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"base_model.model.lm_head.weight": torch.zeros(1)}, file)
    with raises(R3LiteError, "adapter-keys", "base_model.model.lm_head.weight"):
        load_adapter(model, "b", tmp_path, trainable=False)
    save_file({k: t for k, t in tensors.items() if k != KEY}, file)
    with raises(R3LiteError, "adapter-keys", KEY):
        load_adapter(model, "b", tmp_path, trainable=False)
    file.write_bytes(b"\0" * 100)
    with raises(R3LiteError, "tensors-unreadable"):
        load_adapter(model, "b", tmp_path, trainable=False)
    file.rename(tmp_path / "adapter_model.bin")
    with raises(R3LiteError, "file-unreadable", "adapter_model.safetensors"):
        load_adapter(model, "b", tmp_path, trainable=False)
    with raises(R3LiteError, "adapter-config", "lora_targets", "embed_tokens"):
        add_adapter(model, "c", 8, 16, targets=["embed_tokens"])


def test_of_an_interrupted_run_the_newest_checkpoints_adapter_is_read(small_model, tmp_path):
    """A run folder without `adapter/` had "no adapter", although it had checkpoints."""
    model = small_model()
    for step in (9, 10):
        add_adapter(model, str(step), step, 16)
        save_adapter(model, str(step), tmp_path / f"checkpoint-{step}" / "adapter", "tiny")
    assert read_adapter_config(tmp_path).r == 10 and read_adapter_config(tmp_path / "checkpoint-9").r == 9
    save_adapter(model, "9", tmp_path / "adapter", "tiny")
    assert read_adapter_config(tmp_path).r == 9
