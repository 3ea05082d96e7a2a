"""Chats of an export: its special tokens and its template are those of the training, and so are its prompts."""

import json
import re
from datetime import date
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from r3lite.core.errors import R3LiteError
from r3lite.core.files import read_record, write_text
from r3lite.core.records import Record, Source
from r3lite.protocols.base import Protocol
from r3lite.protocols.chat_template import ChatTemplate
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.protocols.tokenizer_classes import FOLLOWS_THE_FILE, other_class
from r3lite.protocols.tokenizer_files import chat_template, probe, special_tokens, template_file

QUESTION = "Who is married to the composer of Jelsan Janli?"
SWITCH = "enable_thinking"  # of some templates
CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
SPECIAL, TEMPLATE = "special_tokens_map.json", "chat_template.jinja"
ANOTHER_DAY = date(2031, 12, 4)  # of programs that use an export: it is not the date of the training
REMEDY = "Nothing was written. Pass another --form, or a base with its original tokenizer files."


def opening(tokenizer: Tokenizer, protocol: Protocol, question: str) -> list[dict[str, str]]:
    """The messages that an episode opens with, as the chat template takes them: system, worked example, question."""
    system = [{"role": "system", "content": protocol.system}] if protocol.system else []
    messages = [*system, *protocol.shots, {"role": "user", "content": protocol.opening(question)}]
    return list(tokenizer.folded(messages))


def trained_template(tokenizer: Tokenizer) -> str:
    """The chat template of the training: thoughts are switched as they were, whatever a program's default is, and the
    date is that of the training."""
    source = tokenizer.template.source
    value = str(tokenizer.template.variables[SWITCH]).lower()
    return f"{{%- set {SWITCH} = {value} %}}{source}" if SWITCH in source else source


def write_dated(output: Path, tokenizer: Tokenizer) -> None:
    """Writes the chat template of the training beside an adapter, if that of its base writes today's date."""
    if tokenizer.template.has_clock:
        write_text(output / TEMPLATE, trained_template(tokenizer))


def changes(folder: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """What the files of an export say otherwise than those of its base, for `saving.save_merged`.

    The base of a chat model may end its texts by another token than that of a turn, and then never stops.
    """
    path = folder / (GENERATION if (folder / GENERATION).is_file() else CONFIG)
    found = read_record(path, "Copy it from the model's source.").values.get("eos_token_id")
    theirs = [id for id in (found if isinstance(found, list) else [found]) if isinstance(id, int)]
    ids, tokens = {"eos_token_id": tokenizer.stop_id, "pad_token_id": tokenizer.pad_id}, tokenizer.special_tokens
    ends = list(dict.fromkeys([tokenizer.stop_id, *theirs]))
    made: dict[str, Any] = {CONFIG: ids, GENERATION: ids | {"eos_token_id": ends}, TOKENIZER: dict(tokens)}
    if tokenizer.other_class:
        made[TOKENIZER]["tokenizer_class"] = FOLLOWS_THE_FILE
    if (folder / SPECIAL).is_file():
        made[SPECIAL] = tokens
    if (folder / TEMPLATE).is_file():
        made[TEMPLATE] = trained_template(tokenizer)
    else:
        made[TOKENIZER]["chat_template"] = trained_template(tokenizer)
    return made


def check_folder(folder: Path, messages: list[dict[str, str]], ids: list[int]) -> None:
    """`check` of what transformers makes of a model folder, on another day and by its own tokenizer class."""
    config = read_record(folder / TOKENIZER, "")
    record = read_record(folder / "tokenizer.json", "")
    definition = json.dumps(record.values)
    if other := other_class(folder, record, probe()):
        raise R3LiteError(
            f"{folder}: transformers splits text by its {other}, not as the training did",
            REMEDY,
            code="tokenization-differs",
        )
    source = chat_template(folder, config)
    where = str(template_file(folder))
    template = ChatTemplate(source, where, tokens=special_tokens(config), thinking=None, day=ANOTHER_DAY)
    check(str(folder), definition, template.render(messages, prompt=True), ids)


def check_adapter(output: Path, base: Path, thinking: bool, messages: list[dict[str, str]], ids: list[int]) -> None:
    """`check` of what transformers makes of an adapter alone: with the base's tokenizer and template, unless the
    adapter's folder has one, and with `thinking` passed."""
    config = read_record(base / TOKENIZER, "")
    definition = (base / "tokenizer.json").read_text(encoding="utf-8")
    place = output if (output / TEMPLATE).is_file() else base
    source = chat_template(place, config)
    where = str(template_file(place))
    template = ChatTemplate(source, where, tokens=special_tokens(config), thinking=thinking, day=ANOTHER_DAY)
    check(str(place), definition, template.render(messages, prompt=True), ids)


def check_gguf(
    path: Path, files: dict[str, dict[str, Any]], modelfile: str, messages: list[dict[str, str]], ids: list[int]
) -> None:
    """`check` of what llama.cpp and Ollama make of a GGUF file that was read as `files`, and of its Modelfile."""
    definition = json.dumps(files["tokenizer.json"])
    config = Record(files[TOKENIZER], Source(str(path)))
    source = config.text("chat_template")
    template = ChatTemplate(source, str(path), tokens=special_tokens(config), thinking=None, day=ANOTHER_DAY)
    check(str(path), definition, template.render(messages, prompt=True), ids)
    check(f"{path.parent / 'Modelfile'}", definition, filled(modelfile, QUESTION), ids, adds_first=True)


def check(where: str, definition: str, text: str, ids: list[int], adds_first: bool = False) -> None:
    """Raises R3LiteError unless a prompt has the tokens `ids` of the training, in the tokenizer of an export.

    `adds_first`: the program puts the token before it that the tokenizer puts before each text.
    """
    backend = Backend.from_str(definition)
    found = backend.encode(text, add_special_tokens=adds_first).ids
    if found != ids:
        made, trained = (backend.decode(tokens, skip_special_tokens=False) for tokens in (found, ids))
        raise R3LiteError(
            f"{where}: other programs would build the prompt {made!r}, not {trained!r}", REMEDY, code="prompt-differs"
        )


def modelfile(file: str, protocol: Protocol, tokenizer: Tokenizer) -> str:
    """Ollama's Modelfile: the weights, and a template that puts what is asked into the prompt."""
    text = tokenizer.chat_text(opening(tokenizer, protocol, "\0"))
    text = re.sub(r'{{|"""', lambda found: f"{{{{ {json.dumps(found[0])} }}}}", text).replace("\0", "{{ .Prompt }}")
    stop = f"PARAMETER stop {tokenizer.stop}\nPARAMETER temperature 0\n"
    return f'FROM ./{file}\nTEMPLATE """{text}{{{{ .Response }}}}"""\n{stop}'


def filled(modelfile: str, question: str) -> str:
    """The prompt that Ollama makes of a Modelfile."""
    template = re.search(r'TEMPLATE """(.*?)"""\n', modelfile, re.DOTALL)[1]
    values = {".Prompt": question, ".Response": ""}

    def value(action: re.Match) -> str:
        return values[action[1]] if action[1] in values else json.loads(action[1])

    return re.sub(r'{{ (\.\w+|"(?:\\.|[^"\\])*") }}', value, template)
