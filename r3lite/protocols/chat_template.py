"""A model folder's chat template, rendered as transformers renders it, and read for the markup that it writes.

Owns the Jinja environment. Templates come from downloaded files, so they run in Jinja's sandbox. Knows no tokens.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from typing import NoReturn

from jinja2 import TemplateError  # jinja2 comes with torch
from jinja2.sandbox import ImmutableSandboxedEnvironment

from r3lite.core.errors import R3LiteError, explained

REMEDY = "Use a model with a supported chat template, such as an instruct model."
ROLES = ("system", "user", "assistant")
THINK, THOUGHT_END = "<think>", "</think>"
EMPTY_THOUGHT = re.compile(rf"{THINK}\s*{THOUGHT_END}\s*$")
# Tags of transformers around what the assistant wrote, which change nothing of the text.
GENERATION = re.compile(r"({%[-+]?\s*)(end)?generation(\s*[-+]?%})")
CLOCK = "strftime_now"  # of transformers and llama.cpp: today's date in the format of its argument
DAY = date(2024, 7, 26)  # the date of all prompts here: that of Llama 3.2's template if it has no clock
# What rendering may raise: a template comes from a download.
FAILURES = (TemplateError, ArithmeticError, LookupError, MemoryError, RecursionError, TypeError, ValueError)


class ChatTemplate:
    """What a chat template writes before, between and after the contents of messages.

    `thinking` is the template's `enable_thinking`; None: not set, as other programs leave it. `source` is the template
    with the date of DAY in place of today's, and `has_clock` says that the folder's template asks for today's.
    """

    def __init__(
        self,
        source: str,
        where: str,
        tokens: Mapping[str, str] | None = None,
        thinking: bool | None = False,
        clock: Callable[[str], str] | None = None,
    ):
        """`tokens` are the special tokens that a template may name, such as `bos_token`; `where` is for errors.

        With a `clock` the template is rendered as it is: as other programs do, which have today's.
        """
        self.source = source if clock else without_clock(source)
        self.where = where
        self.has_clock = CLOCK in source
        self._gaps: dict[tuple[tuple[str, ...], bool], tuple[str, ...]] = {}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = _raise
        if clock:
            environment.globals[CLOCK] = clock
        switch = {} if thinking is None else {"enable_thinking": thinking}
        self.variables = {"documents": None, **switch, **(tokens or {})}
        with explained((TemplateError, RecursionError), f"{where}: the chat template cannot be read", REMEDY):
            self._template = environment.from_string(GENERATION.sub(_condition, self.source))

    def render(self, messages: Sequence[Mapping], prompt: bool = False, tools: Sequence[Mapping] = ()) -> str:
        """The text of a conversation; with `prompt`, up to where the assistant's next turn begins."""
        variables = self.variables | {"tools": list(tools) or None}
        roles = ", ".join(message["role"] for message in messages)
        with explained(FAILURES, f"{self.where}: the chat template refuses a chat of {roles}", REMEDY):
            return self._template.render(messages=messages, add_generation_prompt=prompt, **variables)

    def gaps(self, roles: tuple[str, ...], prompt: bool = False) -> tuple[str, ...]:
        """The texts around the contents of messages of these roles: one more than there are roles.

        Raises R3LiteError if the template does not write each content once, and in order.
        """
        if (roles, prompt) not in self._gaps:
            contents = [f"\ue000{number}\ue001" for number in range(len(roles))]
            messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
            text = self.render(messages, prompt)
            gaps = re.split("\ue000[0-9]+\ue001", text)
            if re.findall("\ue000[0-9]+\ue001", text) != contents:
                cause = f"{self.where}: the chat template writes {'...'.join(gaps)!r} for {', '.join(roles)}"
                raise R3LiteError(f"{cause}; it must write each message once and in order", REMEDY)
            self._gaps[roles, prompt] = tuple(gaps)
        return self._gaps[roles, prompt]

    def earlier(self, reply: str) -> str:
        """What the template writes of an assistant's reply that a user message follows: perhaps without its thought."""
        if THOUGHT_END not in reply:
            return reply
        user = "\ue000"
        before, to_reply, to_user, after = self.gaps(("user", "assistant", "user"))
        roles = {"user": user, "assistant": reply}
        messages = [{"role": role, "content": roles[role]} for role in ("user", "assistant", "user")]
        return self.render(messages).removeprefix(before + user + to_reply).removesuffix(to_user + user + after)

    def trims(self, role: str) -> bool:
        """Whether the template removes spaces around the contents of a role's messages."""
        messages = [{"role": each, "content": "\t\ue000\t"} for each in ("user", "assistant", "user")]
        if role == "system":
            messages = [{"role": role, "content": "\t\ue000\t"}, messages[0]]
        written = re.findall("\t?\ue000\t?", self.render(messages))
        return written[1 if role == "assistant" else 0] != "\t\ue000\t"


def without_clock(source: str) -> str:
    """A template that writes the date of DAY, whatever program renders it, and the same prompt every day.

    It has no clock where it asks whether there is one, and then writes a date of its own, as Llama 3.2's does.
    """
    source = re.sub(rf"\b{CLOCK} is defined\b", "false", source)
    source = re.sub(rf"\b{CLOCK} is not defined\b", "true", source)

    def fixed(call: re.Match) -> str:
        return json.dumps(DAY.strftime(call["format"]))

    return re.sub(rf"""\b{CLOCK}\(\s*(?P<quote>['"])(?P<format>.*?)(?P=quote)\s*\)""", fixed, source)


def _condition(tag: re.Match) -> str:
    return f"{tag[1]}endif{tag[3]}" if tag[2] else f"{tag[1]}if true{tag[3]}"


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
