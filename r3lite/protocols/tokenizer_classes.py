"""The tokenizer classes of transformers: since version 5 some of them split text by a rule of their own.

Such a class takes vocabulary and merges from `tokenizer.json` and ignores the file's rule; version 4, llama.cpp and
r3lite follow the file. The rules are those of transformers 5.24.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from r3lite.core.files import read_record
from r3lite.core.records import Record

QWEN2 = "Qwen2Tokenizer"
GPT2 = "GPT2Tokenizer"
LLAMA = "LlamaTokenizer"
FOLLOWS_THE_FILE = "PreTrainedTokenizerFast"  # the class that follows the file's rule, in versions 4 and 5
ALWAYS = {"qwen2": QWEN2}  # by model type, whatever class the folder names
UNNAMED = {"qwen3": QWEN2}  # by model type, if the folder names none
NEVER = ("mistral",)  # model types for which transformers takes its general class, whatever class the folder names
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Texts whose splitting depends on what stands before and after them, such as a special token or a line break.
PROBE_TEXTS = ("Who, in 1987 and 12345?", "I'LL go\n\n  but don't.", " x\t y", "\nThe end", "\u6f22\u5b57")


def other_class(folder: Path, definition: Record, text: str) -> str | None:
    """Returns the name of transformers' class for a folder if its tokens differ from those of `tokenizer.json`, else
    None.

    To compare them, both encode the same text: PROBE_TEXTS and `text` with a special token between.
    """
    config = read_record(folder / "tokenizer_config.json", "")
    name = class_of(folder, config)
    changes = _rule(name, config, definition.values)
    if changes is None:
        return None
    changed = definition.values | changes
    # These classes build a BPE of their own, without this switch of the file.
    model = definition.values.get("model")
    if isinstance(model, dict) and model.get("ignore_merges"):
        changed["model"] = model | {"ignore_merges": False}
    if changed == definition.values:
        return None
    added_tokens = definition.records("added_tokens", ())
    special_tokens = [token.text("content") for token in added_tokens if token.flag("special", False)]
    separator = "\n"
    if special_tokens:
        separator = special_tokens[0]
    probe = separator.join([*PROBE_TEXTS, text])
    ids_of_file = Backend.from_str(json.dumps(definition.values)).encode(probe).ids
    ids_of_class = Backend.from_str(json.dumps(changed)).encode(probe).ids
    if ids_of_file == ids_of_class:
        return None
    return name


def class_of(folder: Path, config: Record) -> str:
    """Returns the class that transformers takes for a folder with this `tokenizer_config.json`; "" for its general
    one."""
    path = folder / "config.json"
    model_type = None
    if path.is_file():
        model_type = read_record(path, "").text("model_type", None)
    if model_type in NEVER:
        return ""
    name = config.values.get("tokenizer_class")
    if isinstance(name, str):
        name = name.removesuffix("Fast")
    else:
        name = UNNAMED.get(model_type, "")
    return ALWAYS.get(model_type, name)


def _rule(name: str, config: Record, definition: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the keys of a `tokenizer.json` in which the class `name` has a rule of its own; None if it follows the
    file."""
    if name == QWEN2:
        words = {"type": "Split", "pattern": {"Regex": QWEN2_WORDS}, "behavior": "Isolated", "invert": False}
        pretokenizers = [words, _byte_level(use_regex=False)]
        return {"normalizer": {"type": "NFC"}, "pre_tokenizer": {"type": "Sequence", "pretokenizers": pretokenizers}}
    if name == GPT2:
        return {"normalizer": None, "pre_tokenizer": _byte_level(use_regex=True)}
    if name == LLAMA and "ByteLevel" not in json.dumps(definition.get("pre_tokenizer")):
        scheme = "first"
        if config.values.get("legacy"):
            scheme = "always"
        if config.values.get("add_prefix_space") is False:
            scheme = "never"
        spaces = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False}
        return {"normalizer": None, "pre_tokenizer": spaces}
    return None


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}
