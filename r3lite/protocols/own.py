"""Your own formats: a TOML file with headings, read as R3 steps are, or with tags, read as by `--format tags`.

kind = "tags"
think = ["<reason>", "</reason>"]
search = ["<ask>", "</ask>"]              # without it the format does not search
documents = ["<found>", "</found>"]
answer = ["<result>", "</result>"]
prompt = "Reason, then ask or answer. {question}"
"""

import itertools
import re
from collections.abc import Iterator
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
    for problem in _problems(own):
        raise R3LiteError(f"the format {settings.format} {problem}", "See docs/formats.md.")
    prompt = read_prompt(settings.init_prompt) if settings.init_prompt else own["prompt"].strip()
    if own["kind"] == "headings":
        step = read_prompt(settings.step_prompt) if settings.step_prompt else own["documents_prompt"].strip()
        return R3.made(settings, prompt, step, Headings(**{key: own[key] for key in HEADINGS if key in own}))
    if settings.queries_per_step > 1 or settings.verification:
        flag = "--verification" if settings.verification else "--queries-per-step"
        raise UsageError(f"{flag} needs a format with headings, but {settings.format} has tags")
    refuse_step_prompt(settings)
    check_placeholders("the opening prompt", prompt, "question")
    names = ("think", "answer", "search", "documents")
    think, answer, search, documents = (Tag(*own[name]) if name in own else None for name in names)
    lenient, system = settings.tags == "lenient", settings.system_prompt
    return Tags(opening_prompt(prompt, settings), think, answer, search, documents, lenient, system)


def _problems(own: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a file's keys and values; those that follow a problem are not looked at."""
    if own.get("kind") not in tuple(KEYS):  # compared, not looked up: a list has no hash
        yield f"has kind = {own.get('kind')!r}; it must be {' or '.join(KEYS)}"
    needed, optional = KEYS[own["kind"]]
    known, prompts = (*needed, *optional), own.keys() & {"prompt", "documents_prompt"}
    yield from (f"has the unknown key {key!r}{nearest(key, known)}" for key in own if key not in ("kind", *known))
    yield from (f"has no {key}" for key in needed if key not in own)
    yield from (f"has no text as {key}" for key in prompts if not isinstance(own[key], str) or not own[key].strip())
    parts = {key: value for key, value in own.items() if key not in ("kind", *prompts)}
    yield from _problems_of_headings(parts) if own["kind"] == "headings" else _problems_of_tags(parts)


def _problems_of_headings(parts: dict[str, Any]) -> Iterator[str]:
    for key, value in parts.items():
        if not isinstance(value, str) or value != " ".join(value.split()) or not value:
            yield f"has {key} = {value!r}; it must be one line of text"
    for (key, value), (other, text) in itertools.permutations(vars(Headings(**parts)).items(), 2):
        if text.startswith(value):
            yield f"has {other} = {text!r}, which begins as {key} does"


def _problems_of_tags(parts: dict[str, Any]) -> Iterator[str]:
    for key, value in parts.items():
        whole = isinstance(value, list) and all(isinstance(end, str) and TAG.fullmatch(end) for end in value)
        if not whole or len(value) != 2:
            yield f"has {key} = {value!r}; it must be an opening and a closing tag, such as ['<think>', '</think>']"
    every = [end.lower() for pair in parts.values() for end in pair]
    yield from (f"has {end} more than once" for end in every if every.count(end) > 1)
    if ("search" in parts) != ("documents" in parts):
        yield "has only one of search and documents"
