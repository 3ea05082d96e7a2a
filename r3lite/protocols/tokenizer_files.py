"""The files of a model folder's tokenizer: its special tokens, its chat template and its token ids."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from unicodedata import combining, is_normalized

from tokenizers import Tokenizer as Backend

from r3lite.core.errors import R3LiteError
from r3lite.core.files import read_record, read_text
from r3lite.core.records import Record

SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")  # what a template may name
TEMPLATE = "chat_template.jinja"
REMEDY = "A model folder needs {}; copy it from the model's source."


def probe() -> str:
    """Returns a text that a tokenizer must give back as it was.

    It has all bytes of UTF-8, except control characters and the first bytes of characters that nobody writes: SmolLM2's
    vocabulary leaves these out. It has no character that NFC changes.
    """
    code_points = [9, 10, 13]
    code_points += range(0x20, 0x7F)
    code_points += range(0xA0, 0x800)
    code_points += range(0x800, 0xD800, 0x3F1)
    code_points += [0xE001, 0xF001, 0x1F469]
    characters = []
    for code_point in code_points:
        character = chr(code_point)
        if is_normalized("NFC", character) and not combining(character):
            characters.append(character)
    return '\t"Blue Harbor" (1987):' + "".join(characters)


def vocabulary_of(folder: Path) -> int:
    """Returns the `size` of a folder's tokenizer without building the tokenizer, which takes seconds."""
    record = read_record(folder / "tokenizer.json", REMEDY.format("tokenizer.json"))
    ids = [token.whole("id") for token in record.records("added_tokens", ())]
    vocabulary = record.record("model").record("vocab")
    if not vocabulary.values:
        raise record.error("model.vocab is missing")
    ids += map(vocabulary.whole, vocabulary.values)
    return max(ids) + 1


@contextlib.contextmanager
def library_errors(path: Path) -> Iterator[None]:
    """Within the `with` block errors of the tokenizers library become R3LiteErrors that name the file."""
    try:
        yield
    except R3LiteError:
        raise
    except Exception as error:  # the Rust library raises bare Exception for every kind of fault
        raise R3LiteError(
            f"{path} cannot be used: {error}", REMEDY.format(path.name), code="tokenizer-unusable"
        ) from error


def check_ids(definition: Record, backend: Backend) -> None:
    """Raises R3LiteError unless the ids of a tokenizer are those of its file, and no two tokens share one."""
    for token in definition.records("added_tokens", []):
        # The library gives an id of its own to a token whose id does not follow the others.
        content = token.text("content", blank=True)  # Gemma's are line breaks and tabs, too
        id = token.whole("id")
        library_id = backend.token_to_id(content)
        if library_id != id:
            raise token.error(f"{token.path}id is {id}, but {content!r} has the id {library_id}")
    ids = backend.get_vocab(with_added_tokens=True).values()
    if len(set(ids)) < len(ids):
        raise definition.error("two tokens have the same id")


def chat_template(folder: Path, config: Record) -> str:
    """Returns the chat template, from where versions 4 and 5 of transformers put it; empty if there is none."""
    path = template_file(folder)
    if path.name == TEMPLATE:
        return read_text(path, REMEDY.format(TEMPLATE))
    if not isinstance(config.values.get("chat_template"), list):
        return config.text("chat_template", "", blank=True)
    by_name = {}
    for record in config.records("chat_template"):
        by_name[record.text("name")] = record.text("template", blank=True)
    return by_name.get("default", "")


def template_file(folder: Path) -> Path:
    """Returns the file that has a folder's chat template."""
    path = folder / TEMPLATE
    if path.exists():
        return path
    return folder / "tokenizer_config.json"


def special_tokens(config: Record) -> dict[str, str]:
    """Returns the special tokens that a `tokenizer_config.json` has: each is text, or an object with its content."""
    tokens = {}
    for name in SPECIAL:
        if isinstance(config.values.get(name), dict):
            token = config.record(name).text("content")
        else:
            token = config.text(name, None)
        if token is not None:
            tokens[name] = token
    return tokens
