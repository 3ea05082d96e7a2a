"""The model card: what the hub reads of it, and what it tells of the machine that wrote it."""

from pathlib import Path

import pytest
from huggingface_hub.utils import validate_repo_id

from r3lite.core.files import shipped
from r3lite.exporting.card import Facts, card
from r3lite.models.weights import public_name
from r3lite.protocols.registry import build_protocol
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.settings import ProtocolSettings


def text_of(model: str, merged: bool, data: str = "none") -> str:
    base, on_hub = public_name(model)
    run = {"data": data, "seed": 3}
    facts = Facts(base, on_hub, "bf16", file=None, merged=merged, trained=True, run=run)
    tokenizer = Tokenizer.load(shipped("checkpoints", "tiny"))
    return card(facts, build_protocol(ProtocolSettings()), "r3", tokenizer)


@pytest.mark.parametrize("merged", [True, False])
def test_a_folder_of_this_machine_is_not_published(tmp_path, monkeypatch, merged):
    """`base_model: /home/...` was refused by the hub, and would have been read by all."""
    folder = tmp_path / "models" / "my-base"
    folder.mkdir(parents=True)
    data = str(tmp_path / "secret" / "rows.jsonl")
    monkeypatch.chdir(tmp_path)
    for model in (str(folder), "models/my-base", "./models/my-base/", f"{folder}.gguf"):
        text = text_of(model, merged, data)
        assert "base_model:" not in text and "my-base" in text and "data rows.jsonl" in text
        assert str(tmp_path) not in text and "models/" not in text and "secret" not in text


@pytest.mark.parametrize("merged", [True, False])
def test_a_model_of_the_hub_is_named(merged):
    text = text_of("Qwen/Qwen3-0.6B", merged, "org/questions,full,train")
    (line,) = [line for line in text.splitlines() if line.startswith("base_model: ")]
    validate_repo_id(line.removeprefix("base_model: "))
    assert line == "base_model: Qwen/Qwen3-0.6B" and "data org/questions,full,train" in text


def test_the_names_of_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert public_name("tiny") == ("tiny", False)
    assert public_name("me/model") == ("me/model", True)
    Path("me/model").mkdir(parents=True)
    assert public_name("me/model") == ("model", False)
    assert public_name("files/Model-Q4.gguf") == ("Model-Q4.gguf", False)
    assert public_name("C:\\models\\mine")[1] is False
