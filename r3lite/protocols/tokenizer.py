"""Text to token ids and back, and the chat markup of Qwen2.5, from a model folder's tokenizer files.

Owns what a turn looks like in tokens. Knows no step format and no prompt. Text from outside (questions, documents,
steps) is always encoded as plain text: a document with `<|im_end|>` in it cannot forge a turn.
"""

import contextlib
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import ByteLevel

from r3lite.core.errors import R3LiteError
from r3lite.core.files import read_record, read_text
from r3lite.core.records import Record

OPEN, CLOSE = "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant")
REMEDY = "A model folder needs {}; copy it from the model's source."
# A text that a tokenizer must give back as it was.
PROBE = '\t"Blue Harbor" (1987):\n\n caf\u00e9 \u6771\u4eac \U0001f469'
# The system turn that a template writes if the conversation has none. It is a literal of the template; a turn that is
# put together with `+` or `~` from the conversation breaks off at a quote before its end and does not match.
DEFAULT_SYSTEM = re.compile(
    re.escape(OPEN) + r"system(?:\\n|\n)((?:(?!<\||['\"]\s*[+~}]).)*)" + re.escape(CLOSE), re.DOTALL
)


def vocabulary_of(folder: Path) -> int:
    """The `size` of a folder's tokenizer, which is not built for it: that takes seconds."""
    record = read_record(folder / "tokenizer.json", REMEDY.format("tokenizer.json"))
    added = [token.whole("id") for token in record.records("added_tokens", ())]
    words = record.record("model").record("vocab")
    if not words.values:
        raise record.error("model.vocab is missing")
    return max([*added, *map(words.whole, words.values)]) + 1


def _without_added_tokens(marked: Backend) -> Backend:
    """A second tokenizer, which encodes markup as plain text. Both share the vocabulary, which takes long to read."""
    plain = Backend(marked.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(marked, part)) is not None:
            setattr(plain, part, value)
    return plain


class Tokenizer:
    """A byte-level BPE tokenizer with the chat markup of Qwen2.5.

    `size` is the greatest token id + 1 (embeddings are often padded beyond it), `stop_id` ends a turn, `pad_id`
    fills rows up, `default_system` is the system message of a chat that has none of its own, or None.
    """

    def __init__(self, definition: str, default_system: str | None, pad_token: str | None = None):
        """From the text of a `tokenizer.json` that has the markup's tokens."""
        self._marked = Backend.from_str(definition)
        self._plain = _without_added_tokens(self._marked)
        for backend in (self._marked, self._plain):
            backend.no_truncation()
            backend.no_padding()
        self.default_system = default_system
        self.size = max(self._marked.get_vocab(with_added_tokens=True).values()) + 1
        self.open_id, self.stop_id = self._marked.token_to_id(OPEN), self._marked.token_to_id(CLOSE)
        pad_id = self._marked.token_to_id(pad_token) if pad_token else None
        self.pad_id = self.stop_id if pad_id is None else pad_id
        self._newline = self.encode("\n")
        self._answer = self._open("assistant\n")

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """From `tokenizer.json` and `tokenizer_config.json` of a model folder; R3LiteError if they are unusable."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        record = read_record(path, REMEDY.format(path.name))
        config = read_record(folder / "tokenizer_config.json", REMEDY.format("tokenizer_config.json"))
        template = chat_template(folder, config)
        found = DEFAULT_SYSTEM.search(template)
        nested = isinstance(config.values.get("pad_token"), dict)
        pad = config.record("pad_token").text("content") if nested else config.text("pad_token", None)
        with library_errors(path):
            tokenizer = cls(json.dumps(record.values), _unescape(found[1]) if found else None, pad)
            given_back = tokenizer.decode(tokenizer.encode(PROBE))
        check_ids(record, tokenizer._marked)
        known = tokenizer._marked.token_to_id
        lacking = [token for token in (OPEN, CLOSE) if known(token) is None]
        if lacking or OPEN not in template:
            what = f"has no token {lacking[0]}" if lacking else f"has no chat template with {OPEN}"
            raise R3LiteError(f"the tokenizer in {folder} {what}", "Use a model with the chat markup of Qwen2.5.")
        if given_back != PROBE or any(known(byte) is None for byte in ByteLevel.alphabet()):
            remedy = "Use a byte-level tokenizer with its decoder, such as that of Qwen2.5."
            raise R3LiteError(f"{path} does not give every text back as it was", remedy)
        return tokenizer

    @property
    def fingerprint(self) -> str:
        """CRC-32 of the tokens by their ids: models share a vocabulary if theirs are equal."""
        tokens = sorted(self._marked.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
        return f"{zlib.crc32(repr(tokens).encode()):08x}"

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, never special tokens: markup in it is text, too."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens and ids that no token has."""
        return self._marked.decode(list(ids), skip_special_tokens=True)

    def cut(self, text: str, max_tokens: int) -> str:
        """`text` up to the last token boundary at which it takes at most `max_tokens` tokens."""
        encoding = self._plain.encode(text, add_special_tokens=False)
        count = max_tokens
        while len(encoding.ids) > max_tokens:
            if count <= 0:
                return ""
            # Cut before token `count`; a character of several tokens is cut as a whole.
            text = text[: encoding.offsets[count][0]]
            encoding = self._plain.encode(text, add_special_tokens=False)
            # Usually that is enough. But the shorter text may be tokenized differently: then one token less.
            count = min(count, len(encoding.ids)) - 1
        return text

    def open_chat(
        self,
        user: str,
        system: str | None = None,
        earlier: Sequence[dict[str, str]] = (),
        shots: Sequence[dict[str, str]] = (),
    ) -> list[int]:
        """Tokens of a chat up to the model's turn after `user`, which follows a worked example and earlier messages.

        Its system message is that of `earlier`, else `system`, else the markup's default; `shots`, the messages of the
        example, stand after it. See `chat` for what messages are.
        """
        of_earlier = earlier[:1] if earlier and earlier[0]["role"] == "system" else ()
        head = of_earlier or ([] if system is None else [{"role": "system", "content": system}])
        before, _ = self.chat([*head, *shots, *earlier[len(of_earlier) :]])
        return [*before, *self._open(f"user\n{user}"), self.stop_id, *self.assistant_turn()]

    def assistant_turn(self) -> list[int]:
        """Tokens after the end of a turn that open an assistant turn."""
        return [*self._newline, *self._answer]

    def user_turn(self, text: str) -> list[int]:
        """Tokens after the end of an assistant turn: a user turn and the opening of the next assistant turn."""
        return [*self._newline, *self._open(f"user\n{text}"), self.stop_id, *self.assistant_turn()]

    def chat(self, messages: Sequence[dict[str, str]]) -> tuple[list[int], list[bool]]:
        """Tokens of a whole conversation of `role` and `content`, and which of them the assistant wrote.

        The assistant wrote the contents of its turns and the tokens that end them. Contents are encoded apart from the
        opening of the turn, as a model samples them after it.
        """
        ids: list[int] = []
        written: list[bool] = []
        if self.default_system is not None and (not messages or messages[0]["role"] != "system"):
            messages = [{"role": "system", "content": self.default_system}, *messages]
        for message in messages:
            role, content = message["role"], message["content"]
            if role not in ROLES:
                raise R3LiteError(f"a message has the role {role!r}", f"The roles are {', '.join(ROLES)}.")
            if role == "assistant":
                given, own = self._answer, [*self.encode(content), self.stop_id]
            else:
                given, own = [*self._open(f"{role}\n{content}"), self.stop_id], []
            ids += [*given, *own, *self._newline]
            written += [False] * len(given) + [True] * len(own) + [False] * len(self._newline)
        return ids, written

    def _open(self, text: str) -> list[int]:
        return [self.open_id, *self.encode(text)]


@contextlib.contextmanager
def library_errors(path: Path) -> Iterator[None]:
    """Within the `with` block errors of the tokenizers library become R3LiteErrors that name the file."""
    try:
        yield
    except Exception as error:  # the Rust library raises bare Exception for every kind of fault
        raise R3LiteError(f"{path} cannot be used: {error}", REMEDY.format(path.name)) from error


def check_ids(definition: Record, backend: Backend) -> None:
    """Raises R3LiteError unless the ids of a tokenizer are those of its file, and no two tokens share one."""
    for token in definition.records("added_tokens", []):
        # The library gives an id of its own to a token whose id does not follow the others.
        content, id = token.text("content"), token.whole("id")
        if backend.token_to_id(content) != id:
            raise token.error(f"{token.path}id is {id}; the token {content!r} gets {backend.token_to_id(content)}")
    ids = backend.get_vocab(with_added_tokens=True).values()
    if len(set(ids)) < len(ids):
        raise definition.error("two tokens have the same id")


def chat_template(folder: Path, config: Record) -> str:
    """The chat template, from where versions 4 and 5 of transformers put it; empty if there is none."""
    if (folder / "chat_template.jinja").exists():
        return read_text(folder / "chat_template.jinja", REMEDY.format("chat_template.jinja"))
    if not isinstance(config.values.get("chat_template"), list):
        return config.text("chat_template", "", blank=True)
    named = {t.text("name"): t.text("template", blank=True) for t in config.records("chat_template")}
    return named.get("default", "")


def _unescape(literal: str) -> str:
    """The text that the inside of a Jinja string literal stands for."""
    return re.sub(r"\\(.)", lambda m: {"n": "\n", "t": "\t", "r": "\r"}.get(m[1], m[1]), literal)
