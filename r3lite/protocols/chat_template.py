"""The chat template of a model folder: renders chats as transformers does, and finds the markup around the messages.

Templates come from downloaded files, so they run in Jinja's sandbox, in a process with limits (rendering.py). This file
knows text, but no tokens.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import date

from r3lite.core.errors import R3LiteError, explained
from r3lite.protocols.rendering import RENDERER, LimitExceeded, RenderError

REMEDY = "Use a model with a supported chat template, such as an instruct model."
ROLES = ("system", "user", "assistant")
THINK = "<think>"
THOUGHT_END = "</think>"
EMPTY_THOUGHT = re.compile(rf"{THINK}\s*{THOUGHT_END}\s*$")  # at the end of a text
# The tags {% generation %} and {% endgeneration %}, with which templates mark what the assistant wrote. Jinja does not
# know them, and they do not change the text.
GENERATION = re.compile(r"({%[-+]?\s*)(end)?generation(\s*[-+]?%})")
CLOCK = "strftime_now"  # a template function of transformers and llama.cpp: today's date in the format of its argument
DAY = date(2024, 7, 26)  # replaces today's date in all prompts; Llama 3.2's template has this date if there is no clock
# Stands for the content of a message in a rendered chat. It is in Unicode's private area, which real texts do not use.
PLACE = "\ue000"
NUMBERED_PLACE = re.compile("\ue000[0-9]+\ue001")


class ChatTemplate:
    """Renders chats, and returns what a chat template writes before, between and after the contents of messages.

    `source` is the text of the template, with the date DAY in place of today's. `has_clock` says whether the template
    of the folder asks for today's date.
    """

    def __init__(
        self,
        source: str,
        where: str,
        tokens: Mapping[str, str] | None = None,
        thinking: bool | None = False,
        day: date | None = None,
    ):
        """Reads the template `source` of the file `where`, which error messages name.

        `tokens` are the special tokens that a template may use, such as `bos_token`, by name. `thinking` is the value
        of the template's variable `enable_thinking`; None: the variable is not set, as other programs leave it.

        With a `day` the template is not changed, and its clock returns this day. Other programs render the template in
        this way, with today's date.
        """
        self.source = source
        if day is None:
            self.source = without_clock(source)
        self.where = where
        self.has_clock = CLOCK in source
        self._gaps: dict[tuple[tuple[str, ...], bool], tuple[str, ...]] = {}  # results of `gaps` by (roles, prompt)
        self._day = day
        self.variables: dict = {"documents": None}
        if thinking is not None:
            self.variables["enable_thinking"] = thinking
        self.variables |= tokens or {}
        self._jinja_source = GENERATION.sub(_condition, self.source)
        unreadable = f"{where}: the chat template cannot be read"
        with (
            explained(LimitExceeded, unreadable, REMEDY, code="template-limit"),
            explained(RenderError, unreadable, REMEDY, code="template-unreadable"),
        ):
            self._render(None)  # only parses the template

    def render(self, messages: Sequence[Mapping], prompt: bool = False, tools: Sequence[Mapping] = ()) -> str:
        """Returns the text of a conversation. With `prompt` it ends with the markup that begins an assistant turn.

        Raises R3LiteError if the template refuses the conversation, or needs too much time or memory for it.
        """
        variables = self.variables | {
            "messages": list(messages),
            "add_generation_prompt": prompt,
            "tools": list(tools) or None,
        }
        roles = ", ".join(message["role"] for message in messages)
        too_much = f"{self.where}: the chat template cannot render a chat of {roles}"
        refused = f"{self.where}: the chat template refuses a chat of {roles}"
        with (
            explained(LimitExceeded, too_much, REMEDY, code="template-limit"),
            explained(RenderError, refused, REMEDY, code="template-refuses-chat"),
        ):
            return self._render(variables)

    def _render(self, variables: dict | None) -> str:
        day = None
        if self._day:
            day = self._day.isoformat()
        return RENDERER.render(self._jinja_source, variables, day)

    def gaps(self, roles: tuple[str, ...], prompt: bool = False) -> tuple[str, ...]:
        """Returns the texts before, between and after the contents of messages of these roles: len(roles) + 1 texts.

        With `prompt` the last text ends with the markup that begins an assistant turn.

        Raises R3LiteError if the template does not write each content once, and in order.
        """
        if (roles, prompt) not in self._gaps:
            contents = [f"\ue000{number}\ue001" for number in range(len(roles))]
            messages = [_message(role, content) for role, content in zip(roles, contents, strict=True)]
            text = self.render(messages, prompt)
            gaps = NUMBERED_PLACE.split(text)
            if NUMBERED_PLACE.findall(text) != contents:
                cause = f"{self.where}: the chat template writes {'...'.join(gaps)!r} for {', '.join(roles)}"
                raise R3LiteError(
                    f"{cause}; it must write each message once and in order", REMEDY, code="template-unsupported"
                )
            self._gaps[roles, prompt] = tuple(gaps)
        return self._gaps[roles, prompt]

    def earlier_reply(self, reply: str) -> str:
        """Returns the text that the template writes for an assistant's reply if a user message follows it.

        Some templates leave out the thought of such a reply.
        """
        if THOUGHT_END not in reply:
            return reply
        start, to_reply, to_user, end = self.gaps(("user", "assistant", "user"))
        messages = [_message("user", PLACE), _message("assistant", reply), _message("user", PLACE)]
        text = self.render(messages)
        return text.removeprefix(start + PLACE + to_reply).removesuffix(to_user + PLACE + end)

    def trims(self, role: str) -> bool:
        """Returns whether the template removes spaces around the contents of a role's messages."""
        content = f"\t{PLACE}\t"
        index = 0  # of the message that has the role
        if role == "system":
            messages = [_message(role, content), _message("user", content)]
        else:
            messages = [_message(role_in_turn, content) for role_in_turn in ("user", "assistant", "user")]
            if role == "assistant":
                index = 1
        contents = re.findall(f"\t?{PLACE}\t?", self.render(messages))
        return contents[index] != content


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def without_clock(source: str) -> str:
    """Returns the template with fixed dates, so that every program renders the same prompt on every day.

    A call of the clock becomes the date DAY. A test whether there is a clock finds none; the template then writes a
    date of its own, as Llama 3.2's does.
    """
    source = re.sub(rf"\b{CLOCK} is defined\b", "false", source)
    source = re.sub(rf"\b{CLOCK} is not defined\b", "true", source)

    def fixed(call: re.Match) -> str:
        return json.dumps(DAY.strftime(call["format"]))

    return re.sub(rf"""\b{CLOCK}\(\s*(?P<quote>['"])(?P<format>.{{0,200}}?)(?P=quote)\s*\)""", fixed, source)


def _condition(tag: re.Match) -> str:
    """Returns the tag that replaces a `generation` tag: that of a condition that is always true."""
    opening, is_end, closing = tag.groups()
    if is_end:
        return f"{opening}endif{closing}"
    return f"{opening}if true{closing}"
