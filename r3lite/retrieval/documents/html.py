"""HTML: the text that a reader sees, without scripts, styles and navigation; a section for each heading.

The package lxml reads tags and entities and closes what a page leaves open. It reports elements one by one and builds
no tree, so that a page's depth costs nothing. Which elements are separate from their neighbors is in the HTML
standard's chapter on rendering.
"""

import re
from collections.abc import Iterator

from r3lite.core.errors import extra
from r3lite.retrieval.documents.section import DocumentSection, under_headings

# Ruby text is the pronunciation of ideographs and would stand between them; an annotation repeats a formula as TeX.
INVISIBLE = {"script", "style", "template", "noscript", "noembed", "noframes", "datalist", "rp", "rt", "annotation"}
WIDGETS = {"button", "select", "svg", "iframe", "canvas"}
NAVIGATION = {"nav", "footer", "aside", "dialog"}
LEFT_OUT = INVISIBLE | WIDGETS | NAVIGATION
PREFORMATTED = {"pre", "listing", "xmp", "plaintext", "textarea"}
# Elements that stand between blank lines. Forms are not left out: some servers put all of a page into one.
PARAGRAPHS = {"p", "div", "section", "article", "main", "header", "hgroup", "search", "blockquote", "address", "center"}
PARAGRAPHS |= {"table", "ul", "ol", "dl", "dir", "menu", "form", "fieldset", "details", "figure"}
PARAGRAPHS |= PREFORMATTED | NAVIGATION
LINES = {"li", "tr", "dt", "dd", "caption", "figcaption", "legend", "summary"}
# Elements with at least a blank between them and their neighbors. A paragraph in a heading gets only a blank.
SEPARATE = {"td", "th"} | WIDGETS | PARAGRAPHS
BREAKS = {"br", "hr"}
HEADINGS = {f"h{level}": level for level in range(1, 7)}

PARAGRAPH_END = re.compile(r"</p\s*>", re.IGNORECASE)
BREAK_END = re.compile(r"</br\s*>", re.IGNORECASE)


def read(text: str, name: str) -> Iterator[DocumentSection]:
    """Returns sections by headings. The text before the first heading gets the page's title.

    If the file ends within a tag, that tag is left out.
    """
    with extra("documents", f"the HTML file {name}", "Or take the HTML files out of the folder."):
        from lxml import etree
    # Without a start tag, browsers still break at these two end tags, but lxml does not report them.
    text = BREAK_END.sub("<br>", PARAGRAPH_END.sub(r"\g<0> ", text))
    page = _Page()
    parser = etree.HTMLParser(target=page, huge_tree=True)  # without huge_tree, long attributes are lost
    parser.feed(text)
    parser.close()
    return under_headings(page.lines, " ".join(page.title.split()))


class _Page:
    """Gathers `lines`, in the form that `under_headings` takes, from a parser's calls."""

    def __init__(self):
        self.lines: list[str | tuple[int, str]] = []
        self.title = ""
        self.text: list[str] = []  # of the paragraph or heading that has begun
        self.line_ended = False  # True if the next text of the paragraph begins a line
        self.heading = 0  # level of the open heading; 0: none is open
        self.preformatted = 0  # number of open elements of PREFORMATTED
        self.left_out = 0  # number of open elements in one that is left out, itself included; 0: none is left out
        self.in_title = False

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        if self.left_out:
            self.left_out += 1
            return
        self._separate(tag)
        if tag in LEFT_OUT or attributes.get("role") == "navigation" or (tag == "title" and self.title):
            self.left_out = 1
        elif tag == "title":
            self.in_title = True
        elif tag in HEADINGS:
            self.heading = HEADINGS[tag]
        elif tag in PREFORMATTED:
            self.preformatted += 1
        elif tag in LINES | BREAKS:
            self._break_line()

    def end(self, tag: str) -> None:
        if self.left_out:
            self.left_out -= 1
            return
        self._separate(tag)
        if tag == "title":
            self.in_title = False
        elif tag in PREFORMATTED:
            self.preformatted -= 1
        elif tag in LINES:
            self.line_ended = True

    def data(self, text: str) -> None:
        if self.in_title:
            self.title += text
        elif not self.left_out:
            if self.line_ended and text.strip():
                self._break_line()
            if not self.preformatted:
                text = text.replace("\r", " ").replace("\n", " ")
            self.text.append(text)

    def close(self) -> None:
        self._end_paragraph()

    def _separate(self, tag: str) -> None:
        """Separates the text before an element's start or end from the text after it, if the element is separate."""
        if tag in HEADINGS or (tag in PARAGRAPHS and not self.heading):
            self._end_paragraph()
        elif tag in SEPARATE and not self.preformatted:
            self.text.append(" ")

    def _break_line(self) -> None:
        self.text.append("\n")
        self.line_ended = False

    def _end_paragraph(self) -> None:
        text = "".join(self.text)
        if not self.preformatted:
            lines = [" ".join(line.split()) for line in text.split("\n")]
            text = "\n".join(lines)
        if text.strip():
            if self.heading:
                self.lines.append((self.heading, " ".join(text.split())))
            else:
                self.lines += [text.strip("\n"), ""]
        self.text = []
        self.line_ended = False
        self.heading = 0
