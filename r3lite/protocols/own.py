"""Formats of one's own: a TOML file with headings, read as R3 steps are, or with tags, read as by `--format tags`.

kind = "tags"
think = ["<reason>", "</reason>"]
search = ["<ask>", "</ask>"]              # without it the format does not search
documents = ["<found>", "</found>"]
answer = ["<result>", "</result>"]
prompt = "Reason, then ask or answer. {question}"
"""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from r3lite.core.config import UsageError
from r3lite.core.errors import R3LiteError, nearest
from r3lite.core.invocation import load_toml
from r3lite.protocols.base import Protocol
from r3lite.protocols.markup import Tag
from r3lite.protocols.r3 import R3, Headings
from r3lite.protocols.tags import Tags
from r3lite.protocols.templates import check_placeholders, opening_prompt, read_prompt, refuse_step_prompt
from r3lite.settings import ProtocolSettings

HEADINGS = tuple(field.name for field in fields(Headings))
# Keys of a file by its kind: those that must be there, and those that may be.
KEYS = {
    "headings": (("prompt", "documents_prompt"), HEADINGS),
    "tags": (("prompt", "think", "answer"), ("search", "documents")),
}
TAG = re.compile(r"<[^<>\s]+>")


def load_own(settings: ProtocolSettings) -> Protocol:
    """The format of a file; raises R3LiteError for what cannot be read without doubt."""
    own = load_toml(Path(settings.format))
    problem = _problem(own)
    if problem:
        raise R3LiteError(f"the format {settings.format} {problem}", "docs/formats.md tells what such a file holds.")
    prompt = read_prompt(settings.init_prompt) if settings.init_prompt else own["prompt"].strip()
    if own["kind"] == "headings":
        step = read_prompt(settings.step_prompt) if settings.step_prompt else own["documents_prompt"].strip()
        return R3.made(settings, prompt, step, Headings(**{key: own[key] for key in HEADINGS if key in own}))
    if settings.queries_per_step > 1 or settings.verification:
        flag = "--verification" if settings.verification else "--queries-per-step"
        raise UsageError(f"{flag} is for headings, and the format {settings.format} has tags: leave it out")
    refuse_step_prompt(settings)
    check_placeholders("the opening prompt", prompt, "question")
    names = ("think", "answer", "search", "documents")
    think, answer, search, documents = (Tag(*own[name]) if name in own else None for name in names)
    lenient, system = settings.tags == "lenient", settings.system_prompt
    return Tags(opening_prompt(prompt, settings), think, answer, search, documents, lenient, system)


def _problem(own: dict[str, Any]) -> str | None:
    """What is wrong with a file's keys and values, or None."""
    if own.get("kind") not in KEYS:
        return f"has the kind {own.get('kind')!r}; it must be {' or '.join(KEYS)}"
    needed, optional = KEYS[own["kind"]]
    for key in own.keys() - {"kind"}:
        if key not in (*needed, *optional):
            return f"has the unknown key {key!r}{nearest(key, (*needed, *optional))}"
    if missing := [key for key in needed if key not in own]:
        return f"lacks {missing[0]}"
    prompts = [key for key in own if key in ("prompt", "documents_prompt")]
    if bad := [key for key in prompts if not isinstance(own[key], str) or not own[key].strip()]:
        return f"has no text as {bad[0]}"
    parts = {key: value for key, value in own.items() if key not in ("kind", *prompts)}
    return _problem_of_headings(parts) if own["kind"] == "headings" else _problem_of_tags(parts)


def _problem_of_headings(parts: dict[str, Any]) -> str | None:
    if bad := [k for k, v in parts.items() if not isinstance(v, str) or v != " ".join(v.split()) or not v]:
        return f"has {bad[0]} = {parts[bad[0]]!r}; it must be text on a line"
    names = Headings(**parts)
    own = {key: getattr(names, key) for key in HEADINGS}
    for key, value in own.items():
        for other, text in own.items():
            if key != other and text.startswith(value):
                return f"has {other} = {text!r}, which begins as {key} does"
    return None


def _problem_of_tags(parts: dict[str, Any]) -> str | None:
    for key, value in parts.items():
        whole = isinstance(value, list) and all(isinstance(end, str) and TAG.fullmatch(end) for end in value)
        if not whole or len(value) != 2:
            return f"has {key} = {value!r}; it must be an opening and a closing tag, such as ['<think>', '</think>']"
    every = [end.lower() for pair in parts.values() for end in pair]
    if twice := [end for end in every if every.count(end) > 1]:
        return f"has {twice[0]} twice"
    if ("search" in parts) != ("documents" in parts):
        return "has only one of search and documents"
    return None
