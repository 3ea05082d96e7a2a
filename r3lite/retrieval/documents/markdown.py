"""Markdown: a section for each heading, titled by the path of headings that leads to it.

The package markdown-it-py says which lines are headings: whether a line is one depends on all of CommonMark (fences,
lists, quotes, tables, comments). The text of a section is its lines as they are written.
"""

import itertools
import re
from collections.abc import Iterator

from r3lite.core.errors import extra
from r3lite.retrieval.documents.section import DocumentSection, under_headings

LINE_END = re.compile(r"\r\n?|\n")  # those of CommonMark, by which its parser counts


def read(text: str, name: str) -> Iterator[DocumentSection]:
    """Yields sections by headings. Front matter is left out; its title becomes that of the text before the first
    heading.

    Headings in lists and quotes are text: the text after such a list does not belong under them.
    """
    with extra("documents", f"the Markdown file {name}", "Or take the Markdown files out of the folder."):
        from markdown_it import MarkdownIt
    lines = LINE_END.split(text)
    start, title = _front_matter(lines)
    lines = lines[start:]
    parser = MarkdownIt("commonmark").enable("table").disable("inline")  # of inline markup, nothing is needed
    tokens = parser.parse("\n".join(lines))
    headings = []
    for token, next_token in itertools.pairwise(tokens):
        if token.type == "heading_open" and token.level == 0:
            level = int(token.tag[1:])  # tag: h1 to h6
            headings.append((token.map, level, next_token.content))  # map: its first line, the line after its last
    return under_headings(_parts(lines, headings), title)


def _parts(
    lines: list[str],
    headings: list[tuple[list[int], int, str]],
) -> Iterator[str | tuple[int, str]]:
    """Yields the lines, headings among them as (level, text).

    Each of `headings` is ((its first line, the line after its last), level, text).
    """
    place = 0
    for (start, end), level, text in headings:
        yield from lines[place:start]
        yield level, " ".join(text.split())
        place = end
    yield from lines[place:]


def _front_matter(lines: list[str]) -> tuple[int, str]:
    """Returns how many lines the front matter has, and its title.

    It stands between two lines `---`; if a blank line follows the first of them, they are thematic breaks, and the
    lines between them are text (pandoc's rule).
    """
    marks = [number for number, line in enumerate(lines) if line.rstrip() == "---"]
    if len(marks) < 2 or marks[0] != 0 or not lines[1].strip():
        return 0, ""
    end = marks[1]
    title_lines = [line for line in lines[1:end] if line.startswith("title:")]
    if not title_lines:
        return end + 1, ""
    title = title_lines[0].removeprefix("title:").strip()
    is_quoted = len(title) > 1 and title[0] == title[-1] and title[0] in "\"'"
    if is_quoted:
        title = title[1:-1]
    return end + 1, title
