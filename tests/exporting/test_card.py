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
    return card(facts, build_protocol(ProtocolSettings()), ProtocolSettings(), tokenizer)


def use_of(weights: str, merged: bool, trained: bool, settings: ProtocolSettings) -> tuple[str, str]:
    """The whole card, and the last command in it."""
    facts = Facts("tiny", on_hub=False, weights=weights, file=None, merged=merged, trained=trained, run={})
    text = card(facts, build_protocol(settings), settings, Tokenizer.load(shipped("checkpoints", "tiny")))
    return text, text.split("```")[-2].strip()


def test_weights_that_only_r3lite_loads_are_not_said_to_be_of_transformers():
    text, command = use_of("nf4", True, True, ProtocolSettings(worked_example=False))
    assert "transformers" not in text and "library_name: r3lite\n" in text and "Only r3lite can load" in text
    assert command == "python -m r3lite.ask --model FOLDER --index INDEX --no-worked-example"


def test_the_command_of_the_card_asks_with_the_prompts_of_the_training(tmp_path):
    """It asked a model of another format in steps of r3, and a merged one with the worked example."""
    ask = "python -m r3lite.ask --model"
    tags = ProtocolSettings(format="tags", worked_example=False, tags="lenient", search_graph=True)
    flags = "--index INDEX --format tags --search-graph --tags lenient"
    assert use_of("bf16", False, True, tags)[1] == f"{ask} tiny --adapter FOLDER {flags}"
    prompt_file = tmp_path / "my prompt.txt"
    prompt_file.write_text("Answer: {question}", encoding="utf-8")
    text, command = use_of("bf16", True, True, ProtocolSettings(init_prompt=str(prompt_file), worked_example=False))
    assert command == f"{ask} FOLDER --index INDEX --init-prompt 'my prompt.txt' --no-worked-example"
    assert str(tmp_path) not in text
    shipped_prompt = ProtocolSettings(init_prompt="prompts/tiny/init_prompt.txt")
    expected = f"{ask} FOLDER --index INDEX --steps on --init-prompt prompts/tiny/init_prompt.txt"
    assert use_of("bf16", True, False, shipped_prompt)[1] == expected


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
