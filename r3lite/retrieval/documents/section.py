"""What the layouts of documents share: the sections that they make, and the exception for an unreadable document."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

SOFT_HYPHEN = re.compile(r"\u00ad(?:[ \t]*\r?\n[ \t]*)?")


@dataclass(frozen=True)
class DocumentSection:
    """A part of a document that no passage reaches beyond, such as the text under one heading.

    `title` is empty if the document names none. `head` is repeated at the start of each passage.
    """

    text: str
    title: str = ""
    head: str = ""


class Unreadable(Exception):
    """A document that is left out: the reason, in words that are the same for all such cases, and the details."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


def under_headings(lines: Iterable[str | tuple[int, str]], title: str = "") -> Iterator[DocumentSection]:
    """Yields the sections between headings, each titled by its path of headings, such as `Guide > Install > Linux`.

    A heading is (level from 1, text), anything else a line of text. `title` is that of the text before all headings.
    """
    path: list[tuple[int, str]] = []
    section_lines: list[str] = []
    for line in lines:
        if isinstance(line, str):
            section_lines.append(line)
            continue
        yield DocumentSection("\n".join(section_lines), title)
        level, _ = line
        path = [heading for heading in path if heading[0] < level]
        path.append(line)
        title = " > ".join(text for _, text in path)
        section_lines = []
    yield DocumentSection("\n".join(section_lines), title)


def without_soft_hyphens(text: str) -> str:
    """Returns a text without soft hyphens, which mark where a word may be split: nobody types them in a question.

    If a line ends with one, its line end is removed, too, since the word goes on in the next line.
    """
    return SOFT_HYPHEN.sub("", text)
