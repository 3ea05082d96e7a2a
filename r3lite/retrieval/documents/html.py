"""HTML: the text that a reader sees, without scripts, styles and navigation; a section for each heading."""

from collections.abc import Iterator
from html.parser import HTMLParser

from r3lite.retrieval.documents.section import Section, Unreadable, under_headings

# Not forms: some servers put all of a page into one.
LEFT_OUT = {"script", "style", "template", "noscript", "svg", "iframe", "canvas"}
LEFT_OUT |= {"nav", "footer", "aside", "button", "select", "dialog"}
PARAGRAPHS = {"p", "div", "section", "article", "main", "header", "table", "ul", "ol", "dl", "pre", "blockquote"}
BREAKS = dict.fromkeys(("br", "li", "tr", "dt", "dd", "hr", "figcaption", "caption"), "\n") | {"td": " ", "th": " "}
HEADINGS = {f"h{level}": level for level in range(1, 7)}


def read(text: str, name: str) -> Iterator[Section]:
    """The page's title stands over what precedes the first heading. A tag that does not end is not text."""
    page = _Page()
    try:
        page.feed(text + "\n")  # no close(): it looks in the rest for tags, in minutes if that is of 60 KB of "<a "
    except (AssertionError, ValueError) as error:  # html.parser's at `<![x[`, and at `&#` with thousands of digits
        raise Unreadable("not HTML", str(error)) from error
    page.end_paragraph()
    return under_headings(page.lines, " ".join(page.title.split()))


class _Page(HTMLParser):
    """Gathers `lines`, in the form that `under_headings` takes. Keeps counts and no tree: depth costs nothing."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.lines: list[str | tuple[int, str]] = []
        self.title = ""
        self.text: list[str] = []  # of the paragraph or heading that has begun
        self.heading = 0  # its level, or 0
        self.preformatted = self.in_title = False
        self.left_out, self.depth = "", 0  # the element that is left out, and how many of its name are open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self.left_out:
            self.depth += tag == self.left_out
        elif tag in LEFT_OUT or (tag in PARAGRAPHS and ("role", "navigation") in attrs):
            self.left_out, self.depth = tag, 1
        elif tag in HEADINGS:
            self.end_paragraph()
            self.heading = HEADINGS[tag]
        elif tag in PARAGRAPHS:
            self.end_paragraph()
            self.preformatted = tag == "pre"
        elif tag in BREAKS:
            self.text.append(BREAKS[tag])
        elif tag == "title":
            self.in_title = not self.title

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """`<nav/>` opens nothing."""
        if not self.left_out and BREAKS.get(tag) == "\n":
            self.text.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if self.left_out:
            self.depth -= tag == self.left_out
            self.left_out = self.left_out if self.depth else ""
        elif tag in HEADINGS or tag in PARAGRAPHS:
            self.end_paragraph()
        elif tag == "title":
            self.in_title = False

    def handle_data(self, data: str) -> None:
        if self.in_title:
            self.title += data
        elif not self.left_out:
            self.text.append(data if self.preformatted else data.replace("\r", " ").replace("\n", " "))

    def end_paragraph(self) -> None:
        text = "".join(self.text)
        if not self.preformatted:
            text = "\n".join(" ".join(line.split()) for line in text.split("\n"))
        if text.strip():
            self.lines += [(self.heading, " ".join(text.split()))] if self.heading else [text.strip("\n"), ""]
        self.text, self.heading, self.preformatted = [], 0, False
