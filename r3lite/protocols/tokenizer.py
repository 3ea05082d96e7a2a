"""Text to token ids and back, and the turns of a chat in tokens, from a model folder's tokenizer files.

This file decides what a turn looks like in tokens. It knows no step format and no prompt. Text from outside (questions,
documents, steps) is always encoded as plain text: a document with `<|im_end|>` in it cannot forge a turn.
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

# The roles of four test chats. `_check_probes` requires that `chat` encodes them like the rendered template.
PROBES = (
    ("user",),
    ("system", "user"),
    ("user", "assistant", "user"),
    ("system", "user", "assistant", "user"),
)
THOUGHT_TAGS = (THINK, THOUGHT_END)
Messages = Sequence[dict[str, str]]  # of `role` and `content`


def _without_added_tokens(marked: Backend) -> Backend:
    """Returns a second tokenizer, which encodes markup as plain text.

    The two share the vocabulary, because reading it takes long.
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
    """Returns whether an added token is only blanks that the plain vocabulary has, too: text, not markup.

    Gemma's line breaks are such tokens.
    """
    return not token.content.strip() and plain.token_to_id(token.content) == id


class Tokenizer:
    """A byte-level or byte-fallback BPE tokenizer, and the turns of a chat as the folder's template writes them.

    - `size`: the greatest token id + 1; embeddings are often padded beyond it.
    - `stop`, `stop_id`: the token that ends an assistant turn.
    - `pad_id`: the token that fills rows up.
    - `lead`: the blanks, if any, that a model writes before the text of its turn, such as a space.
    - `opens_thought`: whether the template writes <think> before the model's turn, which then begins inside a thought.
    - `other_class`: the tokenizer class of transformers, if its tokens differ from those of `tokenizer.json`.
    """

    other_class: str | None = None

    def __init__(self, definition: str, template: ChatTemplate, pad_token: str | None = None):
        """`definition` is the text of a `tokenizer.json` that has the template's special tokens."""
        self._marked = Backend.from_str(definition)  # encodes markup as its tokens
        self._plain = _without_added_tokens(self._marked)  # encodes markup as plain text
        for backend in (self._marked, self._plain):
            backend.no_truncation()
            backend.no_padding()
        self.size = max(self._marked.get_vocab(with_added_tokens=True).values()) + 1
        added = self._marked.get_added_tokens_decoder()
        # Ids of the added tokens by their text. In this file they are the *special tokens*: markup of chats.
        self._added = {token.content: id for id, token in added.items() if not _is_blank(token, id, self._plain)}
        self.thought_end_id = self._added.get(THOUGHT_END)
        # `decode` leaves these out. It keeps <think> and </think>, even if the tokenizer's file calls them special.
        self._skipped_ids = {id for id, token in added.items() if token.special and token.content not in THOUGHT_TAGS}
        # Matches any special token, of two that begin alike the longer one. Matches nothing if there is none.
        longest_first = sorted(self._added, key=len, reverse=True)
        any_token = "|".join(map(re.escape, longest_first))
        self._markup_pattern = re.compile(f"({any_token or '(?!)'})")
        # SentencePiece writes a space before a text. Text that continues other text must not get this space: it is
        # encoded behind a line break, whose tokens are then removed. `_anchor` has these tokens; it is None for a
        # tokenizer that writes no such space.
        line_break = self._plain.encode("\n", add_special_tokens=False).ids
        letter = self._plain.encode("a", add_special_tokens=False).ids
        letter_on_line = self._plain.encode("\na", add_special_tokens=False).ids
        self._anchor = None
        if letter_on_line != [*line_break, *letter]:
            self._anchor = line_break
        self._space_after_special = True  # whether SentencePiece also writes its space after a special token
        self._read_markup(template)
        self.pad_id = self.stop_id
        if pad_token:
            pad_id = self._marked.token_to_id(pad_token)
            if pad_id is not None:
                self.pad_id = pad_id

    def _read_markup(self, template: ChatTemplate) -> None:
        """Sets the attributes that say how the template begins and ends turns.

        Raises R3LiteError if a longer chat is not a shorter one with turns appended, or if a reply has no stop token.
        """
        self.template = template
        gaps = template.gaps(("user", "assistant", "user"), prompt=True)
        # The markup at the start of the chat, between the contents of its messages, and before the next assistant turn.
        chat_start, to_assistant, to_user, self._generation_prompt = gaps
        gaps_of_one = template.gaps(("user",), prompt=True)
        # After a reply: blanks that belong to it, the stop token, and the start of the user turn.
        tail, stop, self._user_start = self._split_at_token(to_user)
        self.lead = ""
        if to_assistant.startswith(self._generation_prompt):
            self.lead = to_assistant.removeprefix(self._generation_prompt)
        # The prompt and an earlier assistant turn begin alike, but one of them may go on: `to_assistant` with blanks,
        # the lead, or the prompt with what the template adds to it, such as an empty thought.
        ends_turn = stop and not tail.strip()
        opens_turn = not self.lead.strip() and (self.lead or self._generation_prompt.startswith(to_assistant))
        if gaps_of_one != (chat_start, self._generation_prompt) or not ends_turn or not opens_turn:
            one_message = "...".join(gaps_of_one)
            three_messages = "...".join(gaps)
            cause = (
                f"{template.where}: the chat template writes {one_message!r} for 1 message and {three_messages!r} for 3"
                "; it must append turns and end each assistant turn with a token"
            )
            raise R3LiteError(cause, TEMPLATE_REMEDY, code="template-unsupported")
        self.stop = stop
        self.stop_id = self._added[stop]
        self.opens_thought = THINK in self._generation_prompt and THOUGHT_END not in self._generation_prompt
        self._thinking_is_off = bool(EMPTY_THOUGHT.search(self._generation_prompt))
        self._trims = {role for role in ("user", "assistant") if template.trims(role)}
        self._takes_system = self._writes_system_first()
        if self._takes_system and template.trims("system"):
            self._trims.add("system")

    def _writes_system_first(self) -> bool:
        """Returns whether the template writes a system message first, and then the chat exactly as without it.

        If not, `merge_system` puts the system message into the first user message.
        """
        try:
            short = self.template.gaps(("system", "user"), prompt=True)
            long = self.template.gaps(("system", "user", "assistant", "user"), prompt=True)
        except R3LiteError:
            return False
        without_system = self.template.gaps(("user", "assistant", "user"), prompt=True)
        return long[:2] == short[:2] and long[2:] == without_system[1:]

    def _split_at_token(self, text: str) -> tuple[str, str, str]:
        """Returns the text before the first special token, this token, and the text after it.

        If there is no special token, returns the whole text and two empty texts.
        """
        parts = self._markup_pattern.split(text, maxsplit=1)
        if len(parts) == 1:
            return text, "", ""
        start, token, end = parts
        return start, token, end

    @classmethod
    def load(cls, folder: str | Path, thinking: str = "auto") -> "Tokenizer":
        """Returns the tokenizer of a model folder, from its `tokenizer.json` and `tokenizer_config.json`.

        `thinking` is the value of --thinking. `auto` switches thinking off if the template has a switch for it, and
        otherwise leaves it as the template has it.
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
            thinks = tokenizer._generation_prompt != without_thinking.gaps(("user",), prompt=True)[1]
        if (thinking == "on" and not thinks) or (thinking == "off" and thinks):
            raise R3LiteError(
                f"the chat template in {folder} does not support --thinking {thinking}",
                "Remove it.",
                code="thinking-unsupported",
            )
        return tokenizer

    def _check_probes(self) -> None:
        """Raises R3LiteError unless `chat` encodes the chats of PROBES like the rendered template.

        Sets `_space_after_special` to False if the tokens differ with it.
        """
        contents = {"system": "Answer in steps.", "user": "Who wrote it, and when?", "assistant": "Step 1: I look."}
        for roles in PROBES:
            messages = [{"role": role, "content": contents[role]} for role in roles]
            text = self.template.render(self.merge_system(messages), prompt=True)
            expected = self._marked.encode(text, add_special_tokens=False).ids
            # Once False, the attribute stays False for the probes that follow.
            self._space_after_special = self._space_after_special and self.chat(messages, prompt=True)[0] == expected
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
        """The CRC-32 of the tokens in the order of their ids. Models with equal fingerprints share a vocabulary."""
        vocabulary = self._marked.get_vocab(with_added_tokens=True)
        tokens = sorted(vocabulary.items(), key=lambda entry: entry[1])
        return f"{zlib.crc32(repr(tokens).encode()):08x}"

    @property
    def special_tokens(self) -> dict[str, str]:
        """The special tokens of `tokenizer_config.json` by name.

        `eos_token` and `pad_token` are replaced by the tokens that end turns and fill rows up in training.
        """
        variables = self.template.variables
        tokens = {name: variables[name] for name in SPECIAL if name in variables}
        return tokens | {"eos_token": self.stop, "pad_token": self._marked.id_to_token(self.pad_id)}

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of plain text that continues other text. Markup in it is encoded as plain text, too."""
        if self._anchor is None:
            return self._plain.encode(text, add_special_tokens=False).ids
        return self._plain.encode("\n" + text, add_special_tokens=False).ids[len(self._anchor) :]

    def markup_in(self, text: str) -> str | None:
        """Returns the first markup in a text; None if it has none."""
        match = self._markup_pattern.search(text)
        if match is None:
            return None
        return match[0]

    def encode_turn(self, text: str) -> list[int]:
        """Returns the token ids of the text of a whole assistant turn, as a model writes it: with its `lead`."""
        return self.encode_written(self.lead + text)

    def encode_written(self, text: str) -> list[int]:
        """Returns the token ids of text that a model writes.

        They differ from those of `encode` in one way: <think> and </think> become special tokens if the tokenizer has
        these (Qwen3, R1 distills).
        """
        if not self._added.keys() >= {*THOUGHT_TAGS}:
            return self.encode(text)
        # The pattern has a group, so `split` returns the text before the first tag, then tags and texts in turn.
        text_before, *tags_and_texts = re.split(f"({'|'.join(THOUGHT_TAGS)})", text)
        ids = list(self.encode(text_before))
        for tag, text_after in zip(tags_and_texts[::2], tags_and_texts[1::2]):
            ids.append(self._added[tag])
            ids += self._encode_after_token(text_after)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, without unknown ids and special tokens; <think> and </think> stay."""
        return self._marked.decode([id for id in ids if id not in self._skipped_ids], skip_special_tokens=False)

    def cut(self, text: str, max_tokens: int) -> str:
        """Returns `text` up to the last token boundary at which it takes at most `max_tokens` tokens."""
        encoding = self._plain.encode(text, add_special_tokens=False)
        cut_index = max_tokens
        while len(encoding.ids) > max_tokens:
            if cut_index <= 0:
                return ""
            # Cuts before the token at `cut_index`. A character that has several tokens is removed as a whole.
            cut_character, _ = encoding.offsets[cut_index]
            text = text[:cut_character]
            encoding = self._plain.encode(text, add_special_tokens=False)
            # Usually one cut is enough. But the shorter text may have other tokens, and again too many: then the next
            # cut is one token earlier.
            cut_index = min(cut_index, len(encoding.ids)) - 1
        return text

    def open_chat(
        self,
        user: str,
        system: str | None = None,
        earlier: Messages = (),
        shots: Messages = (),
    ) -> list[int]:
        """Returns the tokens of a chat up to where the model's turn begins.

        The chat has, in this order: a system message, the `shots` (messages of a worked example), the `earlier`
        messages of the conversation, and the `user` message. Messages are as in `chat`. If `earlier` begins with a
        system message, this message is used; else `system`; if that is None, the template's default.

        Replies in `earlier` lose their thoughts if the template removes thoughts of earlier replies. Replies in `shots`
        keep them, because the example shows the format.
        """
        earlier = [self._as_earlier(message) for message in earlier]
        head = []
        if earlier and earlier[0]["role"] == "system":
            head = [earlier.pop(0)]
        elif system is not None:
            head = [{"role": "system", "content": system}]
        messages = [*head, *shots, *earlier, {"role": "user", "content": user}]
        return self.chat(messages, prompt=True)[0]

    def chat_text(self, messages: Messages) -> str:
        """Returns the text of a chat up to the assistant's turn, without `bos`."""
        return self.template.render(self.merge_system(messages), prompt=True).removeprefix(self.bos)

    @property
    def bos(self) -> str:
        """The text of the token that the tokenizer puts before each text; empty if it puts none."""
        return self._marked.decode(self._marked.encode("").ids, skip_special_tokens=False)

    @cached_property
    def generation_prompt(self) -> list[int]:
        """The tokens of the markup between the content of a user message and the assistant's turn."""
        return self.encode_marked([self._generation_prompt])

    def assistant_turn(self) -> list[int]:
        """Returns the tokens that begin another assistant turn directly after the stop token of one."""
        gaps = self.template.gaps(("user", "assistant"), prompt=True)
        _, _, next_turn = self._split_at_token(gaps[-1])
        return self.encode_marked([next_turn])

    def user_turn(self, text: str) -> list[int]:
        """Returns the tokens between an assistant's stop token and the next assistant turn: those of a user turn."""
        if "user" in self._trims:
            text = text.strip()
        return self.encode_marked([self._user_start, text, self._generation_prompt])

    def chat(self, messages: Messages, prompt: bool = False) -> tuple[list[int], list[bool]]:
        """Returns the tokens [T] of a conversation, and for each token whether it is trained on [T].

        A message has `role` and `content`. Trained on are the contents of the assistant's messages, with the stop
        tokens that end them, unless a message has `train` False. These contents are encoded apart from the markup
        before them, because a model samples them after it.

        With `prompt` the tokens end where the assistant's next turn begins. Without `prompt`, the `rewritten_replies`
        are written as the template rewrites them, and are not trained on; and R3LiteError is raised if a reply has a
        thought although thinking is off.
        """
        for message in messages:
            if message["role"] not in ROLES:
                raise R3LiteError(
                    f"a message has the role {message['role']!r}",
                    f"The roles are {', '.join(ROLES)}.",
                    code="role-unknown",
                )
        messages = self.merge_system(messages)
        rewritten: set[int] = set()  # indices of messages
        if not prompt:
            rewritten = self.rewritten_replies(messages)
        gaps = self.template.gaps(tuple(message["role"] for message in messages), prompt)
        ids: list[int] = []
        trained: list[bool] = []

        def add(tokens: list[int], are_trained: bool) -> None:
            ids.extend(tokens)
            trained.extend([are_trained] * len(tokens))

        # The texts since the stop token of the previous assistant turn, not encoded yet: markup and contents in turn.
        texts = [gaps[0]]
        for index, (message, gap) in enumerate(zip(messages, gaps[1:], strict=True)):
            if message["role"] != "assistant":
                texts += [self._content(message), gap]
                continue
            if index in rewritten:
                message = self._as_earlier(message)
            # The last markup may end with the lead. It moves into the turn, because the model writes it.
            markup = texts[-1].removesuffix(self.lead)
            lead = texts[-1][len(markup) :]
            content = lead + self._content(message)
            if not prompt and index not in rewritten:
                markup, content = self._with_thought(markup, content)
            tail, stop, next_markup = self._split_at_token(gap)
            turn = self.encode_written(content + tail)
            if stop:
                turn.append(self._added[stop])
            add(self.encode_marked([*texts[:-1], markup]), are_trained=False)
            add(turn, are_trained=index not in rewritten and message.get("train", True))
            texts = [next_markup]
        add(self.encode_marked(texts), are_trained=False)
        return ids, trained

    def rewritten_replies(self, messages: Messages) -> set[int]:
        """Returns the indices of the replies that the template writes differently because a user message follows.

        Templates of thinking models remove the thoughts of earlier replies, so the model samples later turns without
        reading these. R1's template removes even the beginning of an empty thought. Raises R3LiteError if a reply has a
        thought although thinking is off.
        """
        last_user = -1  # index of the last user message
        for index, message in enumerate(messages):
            if message["role"] == "user":
                last_user = index
        rewritten = set()
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            # The reply as it is sampled, with the beginning of its thought, against the reply as an earlier turn.
            thought_start, reply = self._with_thought("", self._content(message))
            if index < last_user and thought_start + reply != self._content(self._as_earlier(message)):
                rewritten.add(index)
        return rewritten

    def _content(self, message: dict[str, str]) -> str:
        """Returns the content of a message, stripped if the template strips the contents of this role."""
        if message["role"] in self._trims:
            return message["content"].strip()
        return message["content"]

    def _as_earlier(self, message: dict[str, str]) -> dict[str, str]:
        """Returns a message as the template writes it before a later user message: a reply may lose its thought."""
        if message["role"] != "assistant":
            return message
        return {**message, "content": self.template.earlier_reply(message["content"])}

    def _with_thought(self, markup: str, text: str) -> tuple[str, str]:
        """Returns the markup before an assistant's reply and the text of the reply, split where sampling begins.

        The markup that begins a turn for sampling may open a thought, or write an empty one. So:
        - An empty thought at the end of `markup` is removed if the reply has a thought.
        - If the template opens thoughts, <think> moves from the reply to the markup; a reply without a thought first
          ends the thought, which stays empty.
        """
        thinks = THOUGHT_END in text and (self.opens_thought or text.lstrip().startswith(THINK))
        if thinks:
            self.refuse_if_thinking_is_off()
            markup = EMPTY_THOUGHT.sub("", markup)
        if not self.opens_thought:
            return markup, text
        thought_start = self._generation_prompt[self._generation_prompt.index(THINK) :]
        if thinks:
            text = text.lstrip().removeprefix(THINK).lstrip("\n")
        else:
            text = f"\n{THOUGHT_END}\n\n{text}"
        return markup + thought_start, text

    def refuse_if_thinking_is_off(self) -> None:
        """Raises R3LiteError if thinking is off: the template writes an empty thought before each reply."""
        if self._thinking_is_off:
            cause = "the data have replies with a thought in <think>, but thinking is off in the chat template"
            raise R3LiteError(
                cause, "Pass --thinking on, here and to all commands that use the adapter.", code="thoughts-off"
            )

    def merge_system(self, messages: Messages) -> Messages:
        """Returns the messages. If the template has no system messages, their text begins the first user message."""
        if self._takes_system or not messages or messages[0]["role"] != "system":
            return messages
        system, *turns = messages
        text = system["content"]
        if turns and turns[0]["role"] == "user":
            user = turns.pop(0)
            text = f"{text}\n\n{user['content']}"
        return [{"role": "user", "content": text}, *turns]

    def encode_marked(self, texts: Sequence[str]) -> list[int]:
        """Returns the tokens of texts that are markup and contents in turn, beginning with markup.

        Only in markup do special tokens count. The text between two special tokens, which may be of several texts, is
        encoded as a whole, as in a rendered chat.
        """
        ids: list[int] = []
        text_run = ""  # the text since the last special token
        for index, text in enumerate(texts):
            is_content = index % 2 == 1
            if is_content:
                text_run += text
                continue
            for piece in self._markup_pattern.split(text):
                if piece not in self._added:
                    text_run += piece
                    continue
                ids += self._encode_after_token(text_run)
                ids.append(self._added[piece])
                text_run = ""
        return ids + self._encode_after_token(text_run)

    def _encode_after_token(self, text: str) -> list[int]:
        """Returns the token ids of text that follows a special token, perhaps with the space of SentencePiece."""
        if not text or not self._space_after_special:
            return self.encode(text)
        # Unlike `encode`, this does not prevent the space.
        return self._plain.encode(text, add_special_tokens=False).ids
