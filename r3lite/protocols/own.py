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
from r3lite.core.files import load_toml
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
    """Returns the format of a file; raises R3LiteError for the first thing in it that is wrong or ambiguous."""
    definition = load_toml(Path(settings.format))
    for problem in _problems(definition):
        raise R3LiteError(f"the format {settings.format} {problem}", "See docs/formats.md.", code="format-invalid")
    prompt = _prompt(settings.init_prompt, definition, key="prompt")
    if definition["kind"] == "headings":
        step = _prompt(settings.step_prompt, definition, key="documents_prompt")
        headings = {key: definition[key] for key in HEADINGS if key in definition}
        return R3.from_prompts(settings, init_prompt=prompt, step_prompt=step, headings=Headings(**headings))
    if settings.verification:
        raise UsageError(
            f"--verification needs a format with headings, but {settings.format} has tags", code="headings-needed"
        )
    if settings.queries_per_step > 1:
        raise UsageError(
            f"--queries-per-step needs a format with headings, but {settings.format} has tags", code="headings-needed"
        )
    refuse_step_prompt(settings)
    check_placeholders("the opening prompt", prompt, "question")
    search = None
    information = None
    if "search" in definition:
        search = Tag(*definition["search"])
        information = Tag(*definition["documents"])
    return Tags(
        opening_prompt(prompt, settings),
        think=Tag(*definition["think"]),
        answer=Tag(*definition["answer"]),
        search=search,
        information=information,
        lenient=settings.tags == "lenient",
        system=settings.system_prompt,
    )


def _prompt(path: str | None, definition: dict[str, Any], key: str) -> str:
    """Returns the prompt in the file `path` that the settings name, or that of the format if they name none."""
    if path:
        return read_prompt(path)
    return definition[key].strip()


def _problems(definition: dict[str, Any]) -> Iterator[str]:
    """Yields what is wrong with a file's keys and values.

    A caller must stop at the first problem: later checks rely on earlier ones.
    """
    kind = definition.get("kind")
    if kind not in tuple(KEYS):  # compared, not looked up: a list has no hash
        yield f"has kind = {kind!r}; it must be {' or '.join(KEYS)}"
    needed, optional = KEYS[kind]
    allowed = (*needed, *optional)
    for key in definition:
        if key not in ("kind", *allowed):
            yield f"has the unknown key {key!r}{nearest(key, allowed)}"
    for key in needed:
        if key not in definition:
            yield f"has no {key}"
    prompts = definition.keys() & {"prompt", "documents_prompt"}
    for key in prompts:
        if not isinstance(definition[key], str) or not definition[key].strip():
            yield f"has no text as {key}"
    parts = {key: value for key, value in definition.items() if key not in ("kind", *prompts)}
    if kind == "headings":
        yield from _problems_of_headings(parts)
    else:
        yield from _problems_of_tags(parts)


def _problems_of_headings(parts: dict[str, Any]) -> Iterator[str]:
    for key, value in parts.items():
        if not isinstance(value, str) or value != " ".join(value.split()) or not value:
            yield f"has {key} = {value!r}; it must be one line of text"
    headings = vars(Headings(**parts))
    for key, longer_key in itertools.permutations(headings, 2):
        if headings[longer_key].startswith(headings[key]):
            yield f"has {longer_key} = {headings[longer_key]!r}, which begins as {key} does"


def _problems_of_tags(parts: dict[str, Any]) -> Iterator[str]:
    for key, value in parts.items():
        if not _is_pair_of_tags(value):
            yield f"has {key} = {value!r}; it must be an opening and a closing tag, such as ['<think>', '</think>']"
    ends = [end.lower() for pair in parts.values() for end in pair]
    for end in ends:
        if ends.count(end) > 1:
            yield f"has {end} more than once"
    if ("search" in parts) != ("documents" in parts):
        yield "has only one of search and documents"


def _is_pair_of_tags(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    return all(isinstance(end, str) and TAG.fullmatch(end) for end in value)
