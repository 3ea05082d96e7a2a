"""What an export says of chats is what was trained: where they end, their template, their system message."""

import json
import re
import shutil

import pytest
import torch

from r3lite import export
from r3lite.core.errors import R3LiteError
from r3lite.exporting import chats
from r3lite.models import lora
from r3lite.models.weights import load_model, resolve_folder
from r3lite.protocols.layout import Layout
from r3lite.protocols.registry import build_protocol
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.settings import LengthSettings, ProtocolSettings
from tests.errors import raises

TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ASKED = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
DEFAULT = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are {{ 'kind' }}.<|im_end|>\n{% endif %}"
NO_THOUGHT = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
THINKING = TURNS + ASKED.replace("{% endif %}", NO_THOUGHT + "{% endif %}")
TODAY = "<|im_start|>system\nToday is {{ strftime_now('%d %b %Y') }}.<|im_end|>\n"
DATED = "{% if strftime_now is defined %}{% set day = strftime_now('%d %b %Y') %}{% else %}{% set day = '1 May 2023' %}"
DATED += "{% endif %}<|im_start|>system\nToday is {{ day }}.<|im_end|>\n"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
TEMPLATES = {
    "default system": DEFAULT + TURNS + ASKED,
    "named": [{"name": "tool_use", "template": "none"}, {"name": "default", "template": DEFAULT + TURNS + ASKED}],
    "thinking": THINKING,
    "no system": NO_SYSTEM + TURNS + ASKED,
    "in a file": DEFAULT + TURNS + ASKED,
    "today": TODAY + TURNS + ASKED,
    "today or a date": DATED + TURNS + ASKED,
}


def token(content: str) -> dict:
    """As versions before 5 of transformers write one."""
    return {"__type": "AddedToken", "content": content, "lstrip": False, "normalized": False, "special": True}


@pytest.fixture
def base(tmp_path):
    """The tiny model with another chat template, as a base: its texts end by another token than a chat's turn."""

    def make(template=TEMPLATES["default system"], in_a_file=False, **settings):
        folder = shutil.copytree(resolve_folder("tiny"), tmp_path / "base")
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        config |= {"eos_token": token("<|endoftext|>"), "pad_token": token("<|endoftext|>"), **settings}
        if in_a_file:
            del config["chat_template"]
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        else:
            config["chat_template"] = template
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        (folder / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}', encoding="utf-8")
        (folder / "generation_config.json").write_text('{"eos_token_id": 1021, "top_k": 7}', encoding="utf-8")
        return folder

    return make


@pytest.fixture
def exported(tmp_path):
    def write(folder, form="folder", *flags, preset=("--preset", "tiny")):
        output = tmp_path / f"out-{form}"
        flags = [*preset, "--model", str(folder), "--form", form, "--prompts", "0", *flags]
        return export.main([*flags, "--weights", "fp32", "--output", str(output)]), output

    return write


def adapter(folder, tmp_path, **run) -> str:
    """A run folder of an adapter of a model, whose settings are `run`."""
    model = load_model(folder, torch.float32, "cpu")
    lora.add_adapter(model, "policy", 2, 4)
    lora.save_adapter(model, "policy", tmp_path / "run" / "adapter", str(folder))
    lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in run.items())
    (tmp_path / "run" / "config.toml").write_text(f"[sft]\n{lines}\n", encoding="utf-8")
    return str(tmp_path / "run")


def prompt(folder, **settings) -> list[int]:
    """The tokens that training begins an episode with."""
    protocol = build_protocol(ProtocolSettings(init_prompt="prompts/tiny/init_prompt.txt", **settings))
    return Layout(Tokenizer.load(folder), protocol, LengthSettings()).prompt(chats.QUESTION)


def test_a_base_that_was_trained_on_chats_ends_its_turns(base, exported):
    """Its eos token ended texts, not turns: programs sampled on, 61 of 100 tokens were <|im_end|>."""
    transformers = pytest.importorskip("transformers")
    status, output = exported(base())
    assert status == 0
    generation = transformers.GenerationConfig.from_pretrained(output)
    assert generation.eos_token_id == [1023, 1021] and generation.pad_token_id == 1021 and generation.top_k == 7
    tokenizer = transformers.AutoTokenizer.from_pretrained(output)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert transformers.AutoConfig.from_pretrained(output).eos_token_id == 1023


def test_a_gguf_file_has_the_tokens_that_the_config_has_as_objects(base, exported):
    gguf = pytest.importorskip("gguf")
    status, output = exported(base(bos_token=token("<|im_start|>")), "gguf")
    assert status == 0
    fields = {name: field.contents() for name, field in gguf.GGUFReader(output / "model.gguf").fields.items()}
    token_ids = [fields[f"tokenizer.ggml.{kind}_token_id"] for kind in ("eos", "padding", "bos")]
    assert token_ids == [1023, 1021, 1022]


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_the_prompt_of_other_programs_is_that_of_the_training(base, exported, kind, form):
    folder = base(TEMPLATES[kind], in_a_file=kind == "in a file")
    system = ["--system-prompt", "Be brief."] if kind == "no system" else []
    status, output = exported(folder, form, *system)
    assert status == 0
    expected = prompt(folder, **({"system_prompt": "Be brief."} if system else {}))
    protocol = build_protocol(
        ProtocolSettings(init_prompt="prompts/tiny/init_prompt.txt", system_prompt="Be brief." if system else None)
    )
    messages = chats.opening(Tokenizer.load(folder), protocol, chats.QUESTION)
    if form == "folder":
        theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(output)
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert ids == expected
        assert repr(messages[-1]["content"].replace(chats.QUESTION, "{question}")) in (output / "README.md").read_text()
        assert prompt(output, **({"system_prompt": "Be brief."} if system else {})) == expected
    else:
        text = chats.filled((output / "Modelfile").read_text(encoding="utf-8"), chats.QUESTION)
        assert Tokenizer.load(folder)._marked.encode(text).ids == expected
        assert ("You are kind." in text) == (kind in ("default system", "named", "in a file"))


def test_thoughts_are_as_in_the_run(base, exported, tmp_path):
    """The template's own default is to think, and the adapter alone has the base's template: its card passes it."""
    folder = base(THINKING)
    run = adapter(folder, tmp_path, thinking="auto")
    status, output = exported(folder, "adapter", "--adapter", run)
    card = (output / "README.md").read_text(encoding="utf-8")
    assert status == 0 and "enable_thinking=False\n)" in card and "eos_token_id=1023)" in card
    shutil.rmtree(output)
    (tmp_path / "run" / "config.toml").write_text('[sft]\nthinking = "on"\n', encoding="utf-8")
    status, output = exported(folder, "adapter", "--adapter", run)
    assert status == 0 and "enable_thinking=True\n)" in (output / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("kind", "day"), [("today", "26 Jul 2024"), ("today or a date", "1 May 2023")])
def test_an_adapter_alone_brings_the_date_of_the_training(base, exported, tmp_path, kind, day):
    """The base's template writes today's date, so that no prompt of another program was one of the training."""
    folder = base(TEMPLATES[kind])
    run = adapter(folder, tmp_path)
    messages = [{"role": "user", "content": "Who?"}]
    trained = Tokenizer.load(folder).chat(messages, prompt=True)[0]
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for form in ("adapter", "gguf-adapter"):
        status, output = exported(folder, form, "--adapter", run)
        card = (output / "README.md").read_text(encoding="utf-8")
        assert status == 0 and "chat_template.jinja" in card
        theirs.chat_template = (output / "chat_template.jinja").read_text(encoding="utf-8")
        assert day in theirs.chat_template
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert ids == trained


@pytest.mark.parametrize("kind", ["today", "today or a date"])
def test_the_check_of_an_export_has_another_date_than_the_training(base, kind):
    """It had no clock, and so did not see that other programs write today's date: 88 tokens, not 84."""
    folder = base(TEMPLATES[kind])
    protocol = build_protocol(ProtocolSettings(init_prompt="prompts/tiny/init_prompt.txt"))
    messages = chats.opening(Tokenizer.load(folder), protocol, chats.QUESTION)
    with raises(R3LiteError, "prompt-differs", "Today is 04 Dec 2031"):
        chats.check_folder(folder, messages, prompt(folder))


def split_into_letters(folder) -> None:
    """A rule that Qwen2's tokenizer class does not have."""
    path = folder / "tokenizer.json"
    definition = json.loads(path.read_text(encoding="utf-8"))
    words, _ = definition["pre_tokenizer"]["pretokenizers"]
    words["pattern"] = {"Regex": r"\p{L}"}
    path.write_text(json.dumps(definition), encoding="utf-8")


def test_a_folder_that_transformers_splits_in_another_way_is_refused(base, exported, tmp_path, capsys):
    """For qwen2 it ignores the file's rule, whatever is written; an adapter's card has a class that does not."""
    folder = base()
    split_into_letters(folder)
    status, output = exported(folder, "folder")
    message = capsys.readouterr().err
    assert status == 1 and not output.exists()
    assert "transformers splits text by its Qwen2Tokenizer, not as the training did" in message
    status, output = exported(folder, "adapter", "--adapter", adapter(folder, tmp_path))
    card = (output / "README.md").read_text(encoding="utf-8")
    assert status == 0 and "import AutoModelForCausalLM, PreTrainedTokenizerFast" in card
    assert "tokenizer = PreTrainedTokenizerFast.from_pretrained(" in card


def test_an_export_names_the_class_that_follows_its_file(base):
    """Other types than qwen2 take the class that the folder names."""
    folder = base(tokenizer_class="Qwen2Tokenizer")
    split_into_letters(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"model_type": "qwen3"}
    path.write_text(json.dumps(config), encoding="utf-8")
    tokenizer = Tokenizer.load(folder)
    changes = chats.changes(folder, tokenizer)["tokenizer_config.json"]
    assert tokenizer.other_class == "Qwen2Tokenizer" and changes["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert (
        "tokenizer_class"
        not in chats.changes(resolve_folder("tiny"), Tokenizer.load(resolve_folder("tiny")))["tokenizer_config.json"]
    )


def test_format_and_prompts_are_those_of_the_run_unless_others_are_asked_for(base, exported, tmp_path, capsys):
    folder = base()
    run = adapter(folder, tmp_path, format="tags", system_prompt="Search twice.", init_prompt="none")
    status, output = exported(folder, "folder", "--adapter", run, preset=())
    card = (output / "README.md").read_text(encoding="utf-8")
    assert status == 0 and "The step format is `tags`" in card and "Search twice." in card
    capsys.readouterr()
    status, output = exported(folder, "adapter", "--adapter", run, "--system-prompt", "Search once.", preset=())
    assert status == 0 and "Search once." in (output / "README.md").read_text(encoding="utf-8")
    assert "was trained on" in (stderr := capsys.readouterr().err) and "--system-prompt Search twice." in stderr


@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_an_export_with_another_prompt_is_refused_and_removed(base, exported, monkeypatch, capsys, form):
    monkeypatch.setattr(chats, "trained_template", lambda tokenizer: TURNS + ASKED)  # without the default system
    if form == "gguf":
        from r3lite.exporting import gguf

        monkeypatch.setattr(gguf, "trained_template", chats.trained_template)
    status, output = exported(base(), form)
    stderr = capsys.readouterr().err
    assert (
        status == 1
        and not output.exists()
        and "other programs would build the prompt" in stderr
        and "You are kind." in stderr
    )


def test_a_modelfile_with_another_prompt_is_refused(base):
    folder = base()
    protocol = build_protocol(ProtocolSettings(init_prompt="prompts/tiny/init_prompt.txt"))
    modelfile = chats.modelfile("model.gguf", protocol, Tokenizer.load(folder))
    definition = (folder / "tokenizer.json").read_text(encoding="utf-8")
    chats.check("Modelfile", definition, chats.filled(modelfile, chats.QUESTION), prompt(folder))
    with raises(R3LiteError, "prompt-differs", "Modelfile"):
        chats.check("Modelfile", definition, chats.filled(modelfile, "Why?"), prompt(folder))


def test_a_modelfile_keeps_what_go_and_ollama_would_read_as_markup(base):
    folder = base()
    text = 'Say {{ .Prompt }} and """ and }} and "".'
    protocol = build_protocol(ProtocolSettings(init_prompt="prompts/tiny/init_prompt.txt", system_prompt=text))
    modelfile = chats.modelfile("model.gguf", protocol, Tokenizer.load(folder))
    assert modelfile.count('"""') == 2 and '{{ "{{" }} .Prompt }}' in modelfile
    assert text in chats.filled(modelfile, "Who?")


def test_a_base_without_an_adapter_is_exported(exported, capsys):
    status, output = exported(resolve_folder("tiny"))
    assert status == 0
    card = (output / "README.md").read_text(encoding="utf-8")
    assert "not trained further" in card and "adapter" not in card and "exported by r3lite" in card
    ours, theirs = (load_model(f, torch.float32, "cpu").state_dict() for f in (output, resolve_folder("tiny")))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for form in ("adapter", "gguf-adapter"):
        assert exported(resolve_folder("tiny"), form)[0] == 2
        assert "--adapter is missing" in capsys.readouterr().err


def test_the_modelfile_is_the_prompt_of_an_episode():
    protocol = build_protocol(ProtocolSettings(init_prompt="prompts/tiny/init_prompt.txt", system_prompt="Be brief."))
    tokenizer = Tokenizer.load(resolve_folder("tiny"))
    text = chats.modelfile("model.gguf", protocol, tokenizer)
    template = re.search(r'TEMPLATE """(.*?)"""', text, re.DOTALL)[1]
    filled = template.replace("{{ .Prompt }}", "Who?").replace("{{ .Response }}", "")
    from tokenizers import Tokenizer as Plain

    ids = Plain.from_file(str(resolve_folder("tiny") / "tokenizer.json")).encode(filled, add_special_tokens=False).ids
    assert ids == tokenizer.open_chat(protocol.question_message("Who?"), "Be brief.")
    assert text.startswith("FROM ./model.gguf\n") and "PARAMETER stop <|im_end|>" in text
