"""What the layouts of documents have in common: the parts that they cut a document into, and why one cannot be read."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

SOFT_HYPHEN = re.compile(r"\u00ad(?:[ \t]*\r?\n[ \t]*)?")


@dataclass(frozen=True)
class Section:
    """A part of a document that no passage reaches beyond, such as what stands under one heading.

    `title` is empty if the document names none. `head` is repeated at the start of each passage.
    """

    text: str
    title: str = ""
    head: str = ""


class Unreadable(Exception):
    """A document that is left out: the reason, in words that count equal cases together, and the details."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


def under_headings(lines: Iterable[str | tuple[int, str]], title: str = "") -> Iterator[Section]:
    """The sections between headings, each titled by its path of headings, such as `Guide > Install > Linux`.

    A heading is (level from 1, text), anything else a line of text. `title` is that of what precedes all headings.
    """
    path: list[tuple[int, str]] = []
    held: list[str] = []
    for line in lines:
        if isinstance(line, str):
            held.append(line)
            continue
        yield Section("\n".join(held), title)
        path = [heading for heading in path if heading[0] < line[0]] + [line]
        title, held = " > ".join(text for _, text in path), []
    yield Section("\n".join(held), title)


def without_soft_hyphens(text: str) -> str:
    """A soft hyphen is where a word may be split, and no part of it: nobody types it in a question. If a line ends with
    one, the word goes on in the next."""
    return SOFT_HYPHEN.sub("", text)
