"""Markdown: a section for each heading, titled by the path of headings that leads to it."""

import re
from collections.abc import Iterator

from r3lite.retrieval.documents.section import Section, under_headings

HEADING = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(.*))?$")
UNDERLINE = re.compile(r" {0,3}(?:=+|-{2,})[ \t]*$")
FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


def read(text: str, name: str) -> Iterator[Section]:
    """Front matter is left out, but for its title, which stands over what precedes the first heading."""
    lines, title = text.splitlines(), ""
    if lines and lines[0].rstrip() == "---" and "---" in lines[1:]:
        end = lines.index("---", 1)
        given = [line.partition(":")[2].strip(" \t\"'") for line in lines[1:end] if line.startswith("title:")]
        lines, title = lines[end + 1 :], given[0] if given else ""
    return under_headings(_headings(lines), title)


def _headings(lines: list[str]) -> Iterator[str | tuple[int, str]]:
    """The lines, headings among them as (level, text). In a fenced block nothing is a heading."""
    fence, is_underline = "", False
    for line, below in zip(lines, [*lines[1:], ""]):
        mark = FENCE.match(line)
        if is_underline:
            is_underline = False
        elif fence or mark:
            ends = fence and mark and mark[1].startswith(fence) and not line.strip(" \t`~")
            fence = "" if ends else fence or mark[1]
            yield line
        elif heading := HEADING.match(line):
            yield len(heading[1]), (heading[2] or "").strip().rstrip("#").strip()
        elif line.strip() and UNDERLINE.match(below):
            yield (1 if "=" in below else 2), line.strip()
            is_underline = True
        else:
            yield line
