"""Text to token ids and back, and the turns of a chat in tokens, from a model folder's tokenizer files.

Owns what a turn looks like in tokens. Knows no step format and no prompt. Text from outside (questions, documents,
steps) is always encoded as plain text: a document with `<|im_end|>` in it cannot forge a turn.
"""

import json
import re
import sys
import zlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from r3lite.core.errors import R3LiteError
from r3lite.core.files import naming_gguf, read_record
from r3lite.protocols.chat_template import EMPTY_THOUGHT, ROLES, THINK, THOUGHT_END, ChatTemplate
from r3lite.protocols.chat_template import REMEDY as TEMPLATE_REMEDY
from r3lite.protocols.tokenizer_classes import other_class
from r3lite.protocols.tokenizer_files import (
    REMEDY,
    SPECIAL,
    chat_template,
    check_ids,
    library_errors,
    probe,
    special_tokens,
    template_file,
)

# The roles of chats whose tokens must be those of the rendered template, up to the assistant's turn.
PROBES = (
    ("user",),
    ("system", "user"),
    ("user", "assistant", "user"),
    ("system", "user", "assistant", "user"),
)
THOUGHT_ENDS = (THINK, THOUGHT_END)
Messages = Sequence[dict[str, str]]  # of `role` and `content`


def _without_added_tokens(marked: Backend) -> Backend:
    """Returns a second tokenizer, which encodes markup as plain text.

    Both share the vocabulary, which takes long to read.
    """
    plain = Backend(marked.model)
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        component = getattr(marked, name)
        if component is not None:
            setattr(plain, name, component)
    for id, token in marked.get_added_tokens_decoder().items():
        if _is_blank(token, id, plain):
            plain.add_tokens([token])
    return plain


def _is_blank(
    token: AddedToken,
    id: int,
    plain: Backend,
) -> bool:
    """Returns whether an added token is a run of blanks of the vocabulary, as Gemma's line breaks: text, no markup."""
    return not token.content.strip() and plain.token_to_id(token.content) == id


class Tokenizer:
    """A byte-level or byte-fallback BPE tokenizer, and the turns of a chat as the folder's template writes them.

    `size` is the greatest token id + 1 (embeddings are often padded beyond it), `stop_id`, of the token `stop`, ends an
    assistant turn, `pad_id` fills rows up. `lead` is what a model writes before the text of its turn, such as a space.
    `opens_thought` says that the model's turn begins inside a thought (`<think>`). `other_class` is the tokenizer class
    of transformers, if it gives other tokens than `tokenizer.json`.
    """

    other_class: str | None = None

    def __init__(self, definition: str, template: ChatTemplate, pad_token: str | None = None):
        """`definition` is the text of a `tokenizer.json` that has the template's special tokens."""
        self._marked = Backend.from_str(definition)
        self._plain = _without_added_tokens(self._marked)
        for backend in (self._marked, self._plain):
            backend.no_truncation()
            backend.no_padding()
        self.size = max(self._marked.get_vocab(with_added_tokens=True).values()) + 1
        added = self._marked.get_added_tokens_decoder()
        self._added = {token.content: id for id, token in added.items() if not _is_blank(token, id, self._plain)}
        self.thought_end_id = self._added.get(THOUGHT_END)
        # What `decode` leaves out. The ends of a thought are read even from a tokenizer that calls them special.
        self._unread = {id for id, token in added.items() if token.special and token.content not in THOUGHT_ENDS}
        longest_first = sorted(self._added, key=len, reverse=True)
        any_token = "|".join(map(re.escape, longest_first))
        self._markup = re.compile(f"({any_token or '(?!)'})")
        # SentencePiece writes a space before a text. So text that goes on after other text is encoded after a line
        # break, whose tokens, the anchor, are then removed.
        line_break = self._plain.encode("\n", add_special_tokens=False).ids
        letter = self._plain.encode("a", add_special_tokens=False).ids
        letter_on_line = self._plain.encode("\na", add_special_tokens=False).ids
        self._anchor = None
        if letter_on_line != [*line_break, *letter]:
            self._anchor = line_break
        self._space_first = True  # whether that space stands after a special token, too
        self._read(template)
        self.pad_id = self.stop_id
        if pad_token:
            pad_id = self._marked.token_to_id(pad_token)
            if pad_id is not None:
                self.pad_id = pad_id

    def _read(self, template: ChatTemplate) -> None:
        """Takes from the template what turns begin and end with, and refuses one whose chats do not grow by turns."""
        self.template = template
        gaps = template.gaps(("user", "assistant", "user"), prompt=True)
        first, to_assistant, to_user, self._prompt = gaps
        gaps_of_one = template.gaps(("user",), prompt=True)
        tail, stop, self._to_user = self._until_token(to_user)
        self.lead = ""
        if to_assistant.startswith(self._prompt):
            self.lead = to_assistant.removeprefix(self._prompt)
        ends_turn = stop and not tail.strip()
        opens_turn = not self.lead.strip() and (self.lead or self._prompt.startswith(to_assistant))
        if gaps_of_one != (first, self._prompt) or not ends_turn or not opens_turn:
            one_message = "...".join(gaps_of_one)
            three_messages = "...".join(gaps)
            cause = (
                f"{template.where}: the chat template writes {one_message!r} for 1 message and {three_messages!r} for 3"
                "; it must append turns and end each assistant turn with a token"
            )
            raise R3LiteError(cause, TEMPLATE_REMEDY, code="template-unsupported")
        self.stop = stop
        self.stop_id = self._added[stop]
        self.opens_thought = THINK in self._prompt and THOUGHT_END not in self._prompt
        self._closes_thought = bool(EMPTY_THOUGHT.search(self._prompt))
        self._trims = {role for role in ("user", "assistant") if template.trims(role)}
        self._takes_system = self._grows_after_system()
        if self._takes_system and template.trims("system"):
            self._trims.add("system")

    def _grows_after_system(self) -> bool:
        """Returns whether the template writes a system message first; if not, `folded` puts it before the first user
        message."""
        try:
            short = self.template.gaps(("system", "user"), prompt=True)
            long = self.template.gaps(("system", "user", "assistant", "user"), prompt=True)
        except R3LiteError:
            return False
        without_system = self.template.gaps(("user", "assistant", "user"), prompt=True)
        return long[:2] == short[:2] and long[2:] == without_system[1:]

    def _until_token(self, text: str) -> tuple[str, str, str]:
        """Returns a text up to its first special token, that token, and the text after it.

        The last two are empty if it has none.
        """
        parts = self._markup.split(text, maxsplit=1)
        if len(parts) == 1:
            return text, "", ""
        start, token, end = parts
        return start, token, end

    @classmethod
    def load(cls, folder: str | Path, thinking: str = "auto") -> "Tokenizer":
        """Returns the tokenizer of a model folder, from its `tokenizer.json` and `tokenizer_config.json`.

        `thinking` is the value of --thinking: `auto` is off if the template has a switch, else as the template has it.
        Raises R3LiteError if the files are unusable.
        """
        folder = Path(folder)
        with naming_gguf(folder):
            return cls._load(folder, thinking)

    @classmethod
    def _load(cls, folder: Path, thinking: str) -> "Tokenizer":
        path = folder / "tokenizer.json"
        record = read_record(path, REMEDY.format(path.name))
        config = read_record(folder / "tokenizer_config.json", REMEDY.format("tokenizer_config.json"))
        tokens = special_tokens(config)
        source = chat_template(folder, config)
        if not source:
            raise R3LiteError(
                f"the tokenizer in {folder} has no chat template", TEMPLATE_REMEDY, code="template-missing"
            )
        where = str(template_file(folder))
        template = ChatTemplate(source, where, tokens=tokens, thinking=thinking == "on")
        text = probe()
        with library_errors(path):
            tokenizer = cls(json.dumps(record.values), template, tokens.get("pad_token"))
            decoded = tokenizer.decode(tokenizer.encode(text))
        check_ids(record, tokenizer._marked)
        if decoded != text:
            remedy = "r3lite needs a byte-level tokenizer with its decoder, such as that of Qwen2.5."
            raise R3LiteError(f"{path} does not decode every text to what was encoded", remedy, code="tokenizer-lossy")
        tokenizer._check_probes()
        with library_errors(path):
            tokenizer.other_class = other_class(folder, record, text)
        if tokenizer.other_class:
            difference = f"transformers 5 splits the text of {folder} by its {tokenizer.other_class}"
            print(f"warning: {difference}, so its tokens differ; r3lite follows {path.name}", file=sys.stderr)
        thinks = tokenizer.opens_thought
        if thinking == "on" and not thinks:
            # Qwen3 opens no thought; with thinking off, its turns begin with an empty one.
            without_thinking = ChatTemplate(source, where, tokens=tokens)
            thinks = tokenizer._prompt != without_thinking.gaps(("user",), prompt=True)[1]
        if (thinking == "on" and not thinks) or (thinking == "off" and thinks):
            raise R3LiteError(
                f"the chat template in {folder} does not support --thinking {thinking}",
                "Remove it.",
                code="thinking-unsupported",
            )
        return tokenizer

    def _check_probes(self) -> None:
        """Raises R3LiteError unless the tokens of PROBES are those of the rendered template."""
        contents = {"system": "Answer in steps.", "user": "Who wrote it, and when?", "assistant": "Step 1: I look."}
        for roles in PROBES:
            messages = [{"role": role, "content": contents[role]} for role in roles]
            text = self.template.render(self.folded(messages), prompt=True)
            expected = self._marked.encode(text, add_special_tokens=False).ids
            # If the tokens differ with a space after special tokens, they are compared without it.
            self._space_first = self._space_first and self.chat(messages, prompt=True)[0] == expected
            ids = self.chat(messages, prompt=True)[0]
            if ids != expected:
                ours = f"r3lite writes {', '.join(roles)} as {self._marked.decode(ids, False)!r}"
                raise R3LiteError(
                    f"{self.template.where}: {ours}, the chat template as {text!r}",
                    TEMPLATE_REMEDY,
                    code="template-tokens-differ",
                )

    @property
    def fingerprint(self) -> str:
        """The CRC-32 of the tokens by their ids: models share a vocabulary if theirs are equal."""
        vocabulary = self._marked.get_vocab(with_added_tokens=True)
        tokens = sorted(vocabulary.items(), key=lambda entry: entry[1])
        return f"{zlib.crc32(repr(tokens).encode()):08x}"

    @property
    def special_tokens(self) -> dict[str, str]:
        """The special tokens of `tokenizer_config.json` by name, with the end of a turn and the padding of training."""
        variables = self.template.variables
        tokens = {name: variables[name] for name in SPECIAL if name in variables}
        return tokens | {"eos_token": self.stop, "pad_token": self._marked.id_to_token(self.pad_id)}

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of plain text that goes on after other text.

        They are never special tokens: markup in it is text, too.
        """
        if self._anchor is None:
            return self._plain.encode(text, add_special_tokens=False).ids
        return self._plain.encode("\n" + text, add_special_tokens=False).ids[len(self._anchor) :]

    def markup_in(self, text: str) -> str | None:
        """Returns the first markup in a text; None if it has none."""
        match = self._markup.search(text)
        if match is None:
            return None
        return match[0]

    def encode_turn(self, text: str) -> list[int]:
        """Returns the token ids of the text of an assistant turn, as a model writes it from the turn's beginning on."""
        return self.encode_written(self.lead + text)

    def encode_written(self, text: str) -> list[int]:
        """Returns the token ids of what a model writes.

        They are those of `encode`, but <think> and </think> are tokens if the vocabulary has them (Qwen3, R1 distills).
        """
        if not self._added.keys() >= {*THOUGHT_ENDS}:
            return self.encode(text)
        first, *pieces = re.split(f"({'|'.join(THOUGHT_ENDS)})", text)
        ids = list(self.encode(first))
        for thought_end, piece in zip(pieces[::2], pieces[1::2]):
            ids.append(self._added[thought_end])
            ids += self._after_token(piece)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, without special tokens and ids that no token has."""
        return self._marked.decode([id for id in ids if id not in self._unread], skip_special_tokens=False)

    def cut(self, text: str, max_tokens: int) -> str:
        """Returns `text` up to the last token boundary at which it takes at most `max_tokens` tokens."""
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
        earlier: Messages = (),
        shots: Messages = (),
    ) -> list[int]:
        """Returns the tokens of a chat up to the model's turn after `user`, which follows a worked example and earlier
        messages.

        Its system message is that of `earlier`, else `system`, else the template's default; `shots`, the messages of
        the example, stand after it. See `chat` for what messages are. Earlier replies lose their thoughts if the
        template removes them; the example, which shows a format, keeps its own.
        """
        earlier = [self._shortened(message) for message in earlier]
        head = []
        if earlier and earlier[0]["role"] == "system":
            head = [earlier.pop(0)]
        elif system is not None:
            head = [{"role": "system", "content": system}]
        messages = [*head, *shots, *earlier, {"role": "user", "content": user}]
        return self.chat(messages, prompt=True)[0]

    def chat_text(self, messages: Messages) -> str:
        """Returns the text of a chat up to the assistant's turn, without the token that a tokenizer puts before each
        text."""
        return self.template.render(self.folded(messages), prompt=True).removeprefix(self.first)

    @property
    def first(self) -> str:
        """The token that the tokenizer puts before each text, or nothing."""
        return self._marked.decode(self._marked.encode("").ids, skip_special_tokens=False)

    @cached_property
    def opening(self) -> list[int]:
        """The tokens between a user message and the assistant's turn."""
        return self.encode_marked([self._prompt])

    def assistant_turn(self) -> list[int]:
        """Returns the tokens after the end of an assistant turn that open another one."""
        gaps = self.template.gaps(("user", "assistant"), prompt=True)
        _, _, next_turn = self._until_token(gaps[-1])
        return self.encode_marked([next_turn])

    def user_turn(self, text: str) -> list[int]:
        """Returns the tokens after the end of an assistant turn: a user turn and the opening of the next assistant
        turn."""
        if "user" in self._trims:
            text = text.strip()
        return self.encode_marked([self._to_user, text, self._prompt])

    def chat(self, messages: Messages, prompt: bool = False) -> tuple[list[int], list[bool]]:
        """Returns the tokens [T] of a whole conversation of `role` and `content`, and for each of them whether it is
        trained on [T].

        The contents of the assistant's turns and the tokens that end these turns are trained on, unless a message has
        `train` False. Contents are encoded apart from the opening of the turn, as a model samples them after it. With
        `prompt` the assistant's next turn is opened. Without `prompt`, R3LiteError is raised for a thought that is
        switched off, and replies of `unlike_written` are as the template has them, and not trained on.
        """
        for message in messages:
            if message["role"] not in ROLES:
                raise R3LiteError(
                    f"a message has the role {message['role']!r}",
                    f"The roles are {', '.join(ROLES)}.",
                    code="role-unknown",
                )
        messages = self.folded(messages)
        changed: set[int] = set()
        if not prompt:
            changed = self.unlike_written(messages)
        gaps = self.template.gaps(tuple(message["role"] for message in messages), prompt)
        ids: list[int] = []
        trained: list[bool] = []

        def add(tokens: list[int], are_trained: bool) -> None:
            ids.extend(tokens)
            trained.extend([are_trained] * len(tokens))

        texts = [gaps[0]]  # markup and contents in turn, since the last turn of the assistant
        for number, (message, gap) in enumerate(zip(messages, gaps[1:], strict=True)):
            if message["role"] != "assistant":
                texts += [self._content(message), gap]
                continue
            if number in changed:
                message = self._shortened(message)
            opening = texts[-1].removesuffix(self.lead)
            lead = texts[-1][len(opening) :]
            content = lead + self._content(message)
            if not prompt and number not in changed:
                opening, content = self._with_thought(opening, content)
            tail, stop, gap = self._until_token(gap)
            turn = self.encode_written(content + tail)
            if stop:
                turn.append(self._added[stop])
            add(self.encode_marked([*texts[:-1], opening]), False)
            add(turn, number not in changed and message.get("train", True))
            texts = [gap]
        add(self.encode_marked(texts), False)
        return ids, trained

    def unlike_written(self, messages: Messages) -> set[int]:
        """Returns the numbers of the replies that the template changes because a user message follows.

        Templates of thinking models remove the thoughts of earlier replies, so that what follows is sampled without
        them; R1's template removes even the beginning of an empty thought. Raises R3LiteError for a thought that is
        switched off.
        """
        last_user = -1
        for number, message in enumerate(messages):
            if message["role"] == "user":
                last_user = number
        changed = set()
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            opening, reply = self._with_thought("", self._content(message))
            if number < last_user and opening + reply != self._content(self._shortened(message)):
                changed.add(number)
        return changed

    def _content(self, message: dict[str, str]) -> str:
        """Returns the content of a message as the template writes it."""
        if message["role"] in self._trims:
            return message["content"].strip()
        return message["content"]

    def _shortened(self, message: dict[str, str]) -> dict[str, str]:
        """Returns a message as the template writes it before a later user message."""
        if message["role"] != "assistant":
            return message
        return {**message, "content": self.template.earlier(message["content"])}

    def _with_thought(self, opening: str, text: str) -> tuple[str, str]:
        """Returns the opening of an assistant turn and the text that the assistant wrote after it, as after
        `open_chat`, which may have opened a thought."""
        thinks = THOUGHT_END in text and (self.opens_thought or text.lstrip().startswith(THINK))
        if thinks:
            self.check_thinking()
            opening = EMPTY_THOUGHT.sub("", opening)
        if not self.opens_thought:
            return opening, text
        thought_opening = self._prompt[self._prompt.index(THINK) :]
        if thinks:
            text = text.lstrip().removeprefix(THINK).lstrip("\n")
        else:
            text = f"\n{THOUGHT_END}\n\n{text}"
        return opening + thought_opening, text

    def check_thinking(self) -> None:
        """Raises R3LiteError if the template ends the thought of each turn before it begins."""
        if self._closes_thought:
            cause = "the data have replies with a thought in <think>, but thinking is off in the chat template"
            raise R3LiteError(
                cause, "Pass --thinking on, here and to all commands that use the adapter.", code="thoughts-off"
            )

    def folded(self, messages: Messages) -> Messages:
        """Returns messages with the system message before the first user message, if the template has no place for
        it."""
        if self._takes_system or not messages or messages[0]["role"] != "system":
            return messages
        system, *turns = messages
        text = system["content"]
        if turns and turns[0]["role"] == "user":
            user = turns.pop(0)
            text = f"{text}\n\n{user['content']}"
        return [{"role": "user", "content": text}, *turns]

    def encode_marked(self, texts: Sequence[str]) -> list[int]:
        """Returns the tokens of markup and contents in turn, beginning with markup.

        Only markup has special tokens. Text between two of them is encoded as a whole, as it is in a rendered chat.
        """
        ids: list[int] = []
        text_run = ""  # the text since the last special token
        for number, text in enumerate(texts):
            is_content = number % 2 == 1
            if is_content:
                text_run += text
                continue
            for piece in self._markup.split(text):
                if piece not in self._added:
                    text_run += piece
                    continue
                ids += self._after_token(text_run)
                ids.append(self._added[piece])
                text_run = ""
        return ids + self._after_token(text_run)

    def _after_token(self, text: str) -> list[int]:
        """Returns the token ids of text that follows a special token."""
        if not text or not self._space_first:
            return self.encode(text)
        return self._plain.encode(text, add_special_tokens=False).ids
