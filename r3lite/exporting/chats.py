"""Makes other programs build the same prompts from an export as the training did.

For that, an export has the special tokens and the chat template of the training, and its prompts are checked.
"""

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
SWITCH = "enable_thinking"  # the variable by which some templates switch thoughts on or off
CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer_config.json"
SPECIAL = "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
ANOTHER_DAY = date(2031, 12, 4)  # when a program uses the export: any day other than that of the training
REMEDY = "Nothing was written. Pass another --form, or a base with its original tokenizer files."


def opening(tokenizer: Tokenizer, protocol: Protocol, question: str) -> list[dict[str, str]]:
    """Returns the messages that an episode opens with, for the chat template: system, worked example, question."""
    messages = []
    if protocol.system:
        messages.append({"role": "system", "content": protocol.system})
    messages += protocol.shots
    messages.append({"role": "user", "content": protocol.question_message(question)})
    return list(tokenizer.merge_system(messages))


def trained_template(tokenizer: Tokenizer) -> str:
    """Returns the chat template of the training.

    It switches thoughts on or off as in the training, whatever a program's default is. `template.source` already has
    the date of the training.
    """
    source = tokenizer.template.source
    value = str(tokenizer.template.variables[SWITCH]).lower()
    if SWITCH not in source:
        return source
    return f"{{%- set {SWITCH} = {value} %}}{source}"


def write_dated(output: Path, tokenizer: Tokenizer) -> None:
    """Writes the chat template of the training beside an adapter, if the base's template would write today's date."""
    if tokenizer.template.has_clock:
        write_text(output / TEMPLATE, trained_template(tokenizer))


def changes(folder: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns what an export changes in the files of its base in `folder`, by file name, for `saving.save_merged`.

    The value of a JSON file is a dict of keys to set, that of the chat template is the text. The token that ends a turn
    becomes the end-of-text token, and the first of several: some bases have another one, and would never stop.
    """
    path = folder / GENERATION
    if not path.is_file():
        path = folder / CONFIG
    eos_ids = read_record(path, "Copy it from the model's source.").values.get("eos_token_id")
    if not isinstance(eos_ids, list):
        eos_ids = [eos_ids]
    ends = [tokenizer.stop_id] + [id for id in eos_ids if isinstance(id, int)]
    ends = list(dict.fromkeys(ends))
    ids = {"eos_token_id": tokenizer.stop_id, "pad_token_id": tokenizer.pad_id}
    tokens = tokenizer.special_tokens
    by_file: dict[str, Any] = {
        CONFIG: ids,
        GENERATION: ids | {"eos_token_id": ends},
        TOKENIZER: dict(tokens),
    }
    if tokenizer.other_class:  # by which transformers would split texts otherwise than tokenizer.json says
        by_file[TOKENIZER]["tokenizer_class"] = FOLLOWS_THE_FILE
    if (folder / SPECIAL).is_file():
        by_file[SPECIAL] = tokens
    if (folder / TEMPLATE).is_file():
        by_file[TEMPLATE] = trained_template(tokenizer)
    else:
        by_file[TOKENIZER]["chat_template"] = trained_template(tokenizer)
    return by_file


def check_folder(folder: Path, messages: list[dict[str, str]], ids: list[int]) -> None:
    """Raises R3LiteError unless transformers makes the prompt `ids` of `messages` with a model folder.

    The prompt is rendered as if on ANOTHER_DAY: today's date must not get into it. Also raises R3LiteError if the
    tokenizer class that the folder names splits texts otherwise than the training did.
    """
    config = read_record(folder / TOKENIZER, "")
    record = read_record(folder / "tokenizer.json", "")
    definition = json.dumps(record.values)
    class_name = other_class(folder, record, probe())
    if class_name:
        cause = f"{folder}: transformers splits text by its {class_name}, not as the training did"
        raise R3LiteError(cause, REMEDY, code="tokenization-differs")
    source = chat_template(folder, config)
    where = str(template_file(folder))
    template = ChatTemplate(source, where, tokens=special_tokens(config), thinking=None, day=ANOTHER_DAY)
    check(str(folder), definition, template.render(messages, prompt=True), ids)


def check_adapter(output: Path, base: Path, thinking: bool, messages: list[dict[str, str]], ids: list[int]) -> None:
    """Raises R3LiteError unless transformers makes the prompt `ids` of `messages` with the adapter in `output`.

    The tokenizer is the base's, and so is the template, unless the adapter's folder has one. `thinking` is passed to
    the template.
    """
    config = read_record(base / TOKENIZER, "")
    definition = (base / "tokenizer.json").read_text(encoding="utf-8")
    folder = base
    if (output / TEMPLATE).is_file():
        folder = output
    source = chat_template(folder, config)
    where = str(template_file(folder))
    template = ChatTemplate(source, where, tokens=special_tokens(config), thinking=thinking, day=ANOTHER_DAY)
    check(str(folder), definition, template.render(messages, prompt=True), ids)


def check_gguf(
    path: Path, files: dict[str, dict[str, Any]], modelfile: str, messages: list[dict[str, str]], ids: list[int]
) -> None:
    """Raises R3LiteError unless llama.cpp and Ollama make the prompt `ids` with a GGUF file and its Modelfile.

    `files` has the JSON files of a model folder by their names, as read from the GGUF file. `messages` are those of the
    prompt to QUESTION.
    """
    definition = json.dumps(files["tokenizer.json"])
    config = Record(files[TOKENIZER], Source(str(path)))
    source = config.text("chat_template")
    template = ChatTemplate(source, str(path), tokens=special_tokens(config), thinking=None, day=ANOTHER_DAY)
    check(str(path), definition, template.render(messages, prompt=True), ids)
    check(f"{path.parent / 'Modelfile'}", definition, filled(modelfile, QUESTION), ids, adds_first=True)


def check(where: str, definition: str, text: str, ids: list[int], adds_first: bool = False) -> None:
    """Raises R3LiteError unless an export's tokenizer turns the prompt `text` into `ids`, the tokens of the training.

    `definition` is the text of tokenizer.json. With `adds_first`, the program begins the prompt with the token that the
    tokenizer puts before each text.
    """
    backend = Backend.from_str(definition)
    exported_ids = backend.encode(text, add_special_tokens=adds_first).ids
    if exported_ids != ids:
        exported = backend.decode(exported_ids, skip_special_tokens=False)
        trained = backend.decode(ids, skip_special_tokens=False)
        cause = f"{where}: other programs would build the prompt {exported!r}, not {trained!r}"
        raise R3LiteError(cause, REMEDY, code="prompt-differs")


def modelfile(file: str, protocol: Protocol, tokenizer: Tokenizer) -> str:
    """Returns Ollama's Modelfile: the weights, and a template that puts the question into the prompt."""
    text = tokenizer.chat_text(opening(tokenizer, protocol, "\0"))  # "\0" stands for the question
    # `{{` would begin an action of Ollama's template, and `"""` would end it. So each is written as an action that
    # prints it, such as {{ "{{" }}.
    text = re.sub(r'{{|"""', lambda match: f"{{{{ {json.dumps(match[0])} }}}}", text)
    text = text.replace("\0", "{{ .Prompt }}")
    stop = f"PARAMETER stop {tokenizer.stop}\nPARAMETER temperature 0\n"
    return f'FROM ./{file}\nTEMPLATE """{text}{{{{ .Response }}}}"""\n{stop}'


def filled(modelfile: str, question: str) -> str:
    """Returns the prompt that Ollama makes with a Modelfile of `modelfile`."""
    template = re.search(r'TEMPLATE """(.*?)"""\n', modelfile, re.DOTALL)[1]
    values = {".Prompt": question, ".Response": ""}

    def value(action: re.Match) -> str:
        if action[1] in values:
            return values[action[1]]
        return json.loads(action[1])

    return re.sub(r'{{ (\.\w+|"(?:\\.|[^"\\])*") }}', value, template)
