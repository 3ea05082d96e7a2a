"""A model folder's chat template, rendered as transformers renders it, and read for the markup that it writes.

Owns the Jinja environment. Templates come from downloaded files, so they run in Jinja's sandbox. Knows no tokens.
"""

import json
import re
from collections.abc import Mapping, Sequence
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
# What rendering may raise: a template comes from a download.
FAILURES = (TemplateError, ArithmeticError, LookupError, MemoryError, RecursionError, TypeError, ValueError)


class ChatTemplate:
    """What a chat template writes before, between and after the contents of messages.

    `thinking` is the template's `enable_thinking`; None: not set, as other programs leave it.
    """

    def __init__(self, source: str, where: str, tokens: Mapping[str, str] | None = None, thinking: bool | None = False):
        """`tokens` are the special tokens that a template may name, such as `bos_token`; `where` is for errors."""
        self.source, self.where = source, where
        self._gaps: dict[tuple[tuple[str, ...], bool], tuple[str, ...]] = {}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        # Without `strftime_now`: templates that ask for it write a fixed date then, and prompts do not change by day.
        environment.globals["raise_exception"] = _raise
        switch = {} if thinking is None else {"enable_thinking": thinking}
        self.variables = {"documents": None, **switch, **(tokens or {})}
        with explained((TemplateError, RecursionError), f"{where}: the chat template cannot be read", REMEDY):
            self._template = environment.from_string(GENERATION.sub(_condition, source))

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

    def trims(self, role: str) -> bool:
        """Whether the template removes spaces around the contents of a role's messages."""
        messages = [{"role": each, "content": "\t\ue000\t"} for each in ("user", "assistant", "user")]
        if role == "system":
            messages = [{"role": role, "content": "\t\ue000\t"}, messages[0]]
        written = re.findall("\t?\ue000\t?", self.render(messages))
        return written[1 if role == "assistant" else 0] != "\t\ue000\t"


def _condition(tag: re.Match) -> str:
    return f"{tag[1]}endif{tag[3]}" if tag[2] else f"{tag[1]}if true{tag[3]}"


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
