"""Each layout, as its sections by hand; and files that were made to do harm."""

import csv
import io
import sys
import time
import zlib

import pytest

from r3lite.core.errors import R3LiteError
from r3lite.retrieval.documents import READERS
from r3lite.retrieval.documents.section import Unreadable
from tests.errors import raises

PACKAGES = {".md": "markdown_it", ".html": "lxml", ".pdf": "pypdf"}  # of the extra documents


def sections(suffix, content, name="a/b.x"):
    if suffix in PACKAGES:
        pytest.importorskip(PACKAGES[suffix], reason="needs the extra documents")
    all_sections = READERS[suffix](content, name)
    return [(s.title, s.text.strip()) for s in all_sections if s.text.strip()]


@pytest.mark.parametrize("suffix", PACKAGES)
def test_without_its_package_a_layout_names_the_extra(monkeypatch, suffix):
    monkeypatch.setitem(sys.modules, PACKAGES[suffix], None)
    with raises(R3LiteError, "package-missing", "a/b", suffix, PACKAGES[suffix]) as error:
        list(READERS[suffix](b"" if suffix == ".pdf" else "x", f"a/b{suffix}"))
    assert "pip install 'r3lite[documents]'" in error.value.remedy


def test_markdown_is_cut_at_headings_which_fences_have_not():
    text = """---
title: "Front"
date: 2026
---
Before.
# Guide #
Intro.

## Install
```sh
# no heading
```
### Linux
apt

Notes
-----
End.

| a | b |
|---|---|
"""
    assert sections(".md", text) == [
        ("Front", "Before."),
        ("Guide", "Intro."),
        ("Guide > Install", "```sh\n# no heading\n```"),
        ("Guide > Install > Linux", "apt"),
        ("Guide > Notes", "End.\n\n| a | b |\n|---|---|"),
    ]
    assert sections(".md", "no heading\n#hash\n\n---\nmore") == [("", "no heading\n#hash\n\n---\nmore")]


@pytest.mark.parametrize(
    ("text", "read"),
    [
        # Examples of CommonMark 0.31 and of GitHub's tables, and the headings that follow
        ("# A\n```x```\n## B\nb", [("A", "```x```"), ("A > B", "b")]),
        ("# A\n- ```\n  # no\n  ```\n## B\nb", [("A", "- ```\n  # no\n  ```"), ("A > B", "b")]),
        ("# A\n> ```\n> # no\n## B\nb", [("A", "> ```\n> # no"), ("A > B", "b")]),
        ("# A\n~~~\n```\n# no\n~~~\n## B\nb", [("A", "~~~\n```\n# no\n~~~"), ("A > B", "b")]),
        ("# A\n    # no\n\t# no\n## B\nb", [("A", "# no\n\t# no"), ("A > B", "b")]),
        ("# C#\na\n## F# ##\nb\n### \\##\nc", [("C#", "a"), ("C# > F#", "b"), ("C# > F# > \\##", "c")]),
        ("# A\n- one\n- two\n---\nb", [("A", "- one\n- two\n---\nb")]),
        ("# A\n1. one\n   - two\n---\nb", [("A", "1. one\n   - two\n---\nb")]),
        ("# A\n- one\n  ---\n  two\n## B\nb", [("A", "- one\n  ---\n  two"), ("A > B", "b")]),
        ("# A\n> one\n---\nb", [("A", "> one\n---\nb")]),
        ("# A\n| a |\n|---|\n| 1 |\n---\nb", [("A", "| a |\n|---|\n| 1 |\n---\nb")]),
        ("# A\na | b\n--- | ---\n1 | 2\n---\nb", [("A", "a | b\n--- | ---\n1 | 2\n---\nb")]),
        ("# A\n---\n***\n---\nb", [("A", "---\n***\n---\nb")]),
        ("# A\n<!--\n# no\n\n# no\n-->\n## B\nb", [("A", "<!--\n# no\n\n# no\n-->"), ("A > B", "b")]),
        ("# A\n<pre>\n# no\n\n# no\n</pre>\n## B\nb", [("A", "<pre>\n# no\n\n# no\n</pre>"), ("A > B", "b")]),
        ("# A\n[x]: /url\n===\nb", [("A", "[x]: /url\n===\nb")]),
        ("# A\n[x]:\n# B\nb", [("A", "[x]:"), ("B", "b")]),
        ("A\nlong\n one\n===\na\nB\n-\nb", [("A long one", ""), ("A long one > a B", "b")]),
        ("# A\n- one\n\n  ## no\n\n  two\n\n## B\nb", [("A", "- one\n\n  ## no\n\n  two"), ("A > B", "b")]),
        ("# A\r\na\x0cb\u2028c\r## B\r\nb", [("A", "a\x0cb\u2028c"), ("A > B", "b")]),
    ],
)  # fmt: skip
def test_a_line_of_markdown_is_a_heading_where_commonmark_has_one(text, read):
    """Three backticks on one line hid all headings behind them; a comment in a list's fence was a heading."""
    assert sections(".md", text) == [(title, body) for title, body in read if body]


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("---\ntitle: \"The 'new' one\"\n---\na", [("The 'new' one", "a")]),
        ("---\ntitle: 'Rock ''n'' roll'  \n---  \na", [("Rock ''n'' roll", "a")]),
        ("---\ntags: x\n---\na\n---\n", [("a", "")]),
        ("---\n\na\n\n---\nb", [("", "---\n\na\n\n---\nb")]),  # two breaks: the text between them was lost
        ("a\n\n---\ntitle: T\n---\n", [("", "a\n\n---"), ("title: T", "")]),
        ("---\ntitle: T\nb", [("", "---\ntitle: T\nb")]),
    ],
)  # fmt: skip
def test_front_matter_is_the_first_lines_and_nothing_else(text, read):
    assert sections(".md", text) == [(title, body) for title, body in read if body]


def test_html_has_what_a_reader_sees():
    text = """<!doctype html><html><head><title>The
    Site</title><style>p {}</style><script>if (a < b) x("<p>")</script></head><body>
    <nav><ul><li>Menu<nav>inner</nav></ul></nav><div role="navigation">Crumbs</div><form>
    Hello &amp;
      <b>you</b>.<p>Second<br>line<h1>Big <i>one</i></h1><ul><li>a<li>b</ul>
    <table><tr><th>k<td>v</table><pre>x
  y</pre><h3>Deep</h3>tail &lt;b&gt;</form><footer>Foot</footer></body></html>"""
    assert sections(".html", text) == [
        ("The Site", "Hello & you.\n\nSecond\nline"),
        ("Big one", "a\nb\n\nk v\n\nx\n  y"),
        ("Big one > Deep", "tail <b>"),
    ]


@pytest.mark.parametrize(
    ("page", "read"),
    [
        ("<details><summary>Returns</summary>Goods</details>x", "Returns\nGoods\n\nx"),
        ("a<address>Main Street<br>Berlin</address>Office", "a\n\nMain Street\nBerlin\n\nOffice"),
        ("a<form>b<fieldset><legend>Hours</legend>Nine</fieldset>c</form>d", "a\n\nb\n\nHours\nNine\n\nc\n\nd"),
        ("a<center>b</center>c<dir><li>d</dir><menu><li>e</menu>f", "a\n\nb\n\nc\n\nd\n\ne\n\nf"),
        ("a<figure><img><figcaption>b</figcaption></figure>c", "a\n\nb\n\nc"),
        ("a<figcaption>b</figcaption>c<hr>d<p>e", "a\nb\nc\nd\n\ne"),
        ("<hgroup>a<search>b</search></hgroup>c", "a\n\nb\n\nc"),
        ("<ul><li>a<ul><li>b</ul>c<li><p>d</p>e</ul>f", "a\n\nb\n\nc\n\nd\n\ne\n\nf"),
        ("<li>a</li>b<dl><dt>c</dt>d<dd>e</dd>f</dl>", "a\nb\n\nc\nd\ne\nf"),
        ("<table><caption>A</caption>b<tr><th>c<td>d<tr><td><p>e</p><td>f</table>g", "A\nb\nc d\n\ne\n\nf\n\ng"),
        ("a<br>b<br/>c</br>d</p>e</div>f", "a\nb\nc\nd ef"),
        ("a&nbsp;b &amp;amp; &lt;i&gt; &copy2 &#8364;&#x20AC; &nosuch; AT&T", "a b &amp; <i> ©2 €€ &nosuch; AT&T"),
        ("a <b>b</b>old<wbr>er<span>c</span>", "a bolderc"),
        ("<pre>\na\n  b<b>c</b>\n</pre>d\ne<textarea><b>\n f</textarea>g", "a\n  bc\n\nd e\n\n<b>\n f\n\ng"),
        ("<pre>a<div>b\n  c</div>d\n e</pre>f", "a\n\nb\n  c\n\nd\n e\n\nf"),
        ("a<nav>x</nav>b<aside>x</aside>c<footer>x</footer>d<dialog>x</dialog>e", "a\n\nb\n\nc\n\nd\n\ne"),
        ("a<button>x</button>b<select><option>x</select>c<svg><title>x</title></svg>d", "a b c d"),
        ("a<noscript>x<p>x</noscript>b<template><p>x</template>c<style>x</style>d", "abcd"),
        ("a<!-- <p>x</p> -- > x -->b<!-->c<![CDATA[x]]>d<?x?>e", "abcde"),
        ("<div><nav><ul><li>x</div>a<div role=navigation><p>x</div>b", "a\n\nb"),  # the nav ends with its div
        ("<nav/>a", "a"),
        ("<script>if (a</b) '<p>x'</script>a<iframe>x</iframe>b", "a b"),
        ("<ruby>\u6f22<rp>(</rp><rt>kan</rt><rp>)</rp>\u5b57</ruby>", "\u6f22\u5b57"),
        ("<math><mi>x</mi><annotation encoding=tex>y</annotation></math>a", "xa"),
        ("<meta charset=iso-8859-1>Gr\u00f6\u00dfe \u6570", "Gr\u00f6\u00dfe \u6570"),
        ("a < b <3 </", "a < b <3 </"),
        ("<![x[ ]]>a<p>&#" + "9" * 5000 + ";", "a\n\n\ufffd"),  # the standard library's parser raised
        ("<p title='" + "x" * (11 << 20) + "'>a", "a"),
    ],
)  # fmt: skip
def test_html_has_breaks_where_a_browser_has_them(page, read):
    """Words ran together, "ReturnsGoods", at every element that the reader did not know as a block."""
    assert sections(".html", f"<title>T</title>{page}") == [("T", read)]


@pytest.mark.parametrize(
    ("page", "read"),
    [
        ("<h1><div>Big</div><span>o</span>ne<br>two</h1>x", [("Big one two", "x")]),
        ("<h1>A</h1>x<ul><li><h2>B</h2>y</ul>", [("A", "x"), ("A > B", "y")]),
        ("<details><summary><h2>A</h2></summary>x</details>", [("A", "x")]),
        ("<h1>A<h2>B</h2>x", [("A > B", "x")]),
        ("<h2></h2>x<svg><title>S</title></svg><title>T</title>y<title>U</title>", [("T", "x y")]),
        ("<nav><h2>Menu</h2></nav><!-- <h2>No</h2> --><template><h2>No</h2></template>x", [("", "x")]),
    ],
)  # fmt: skip
def test_headings_of_html_are_titles(page, read):
    assert sections(".html", page) == read


@pytest.mark.parametrize(
    ("suffix", "piece"),
    [
        *((".html", piece) for piece in ("<div>", "<a ", "<a b='", "<!--", "</a ", "<![CDATA[", "<script></scrip")),
        *((".html", piece) for piece in ("&", "<h1>x", "<li> ", "<b><i>x</b>", "<table>x", "<nav>", "<title>", "</p>")),
        *((".md", piece) for piece in ("> ", "- ", "| a ", "[a]: <b ", "``` ", "<!--", "# ", "[", "*")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("end", ["", ">"])
def test_hostile_markup_takes_time_in_proportion(suffix, piece, end):
    """html.parser took two minutes for 60 KB of "<a "; a tree by the HTML standard (lexbor) took 1.3 GB for 40 KB."""
    start = time.process_time()
    sections(suffix, piece * 20_000 + end)
    assert time.process_time() - start < 5


def test_rows_are_passages_or_lines_of_their_values():
    rows = '[{"Title": "T", "text": "Body", "x": 1}, {"a": {"b": [1, null, "two"]}, "ok": true}, "alone"]'
    assert sections(".json", rows) == [("T", "Body"), ("", "a.b: 1\na.b: two\nok: True"), ("", "alone")]
    assert sections(".json", '{"name": "N", "k": "v"}') == [("N", "name: N\nk: v")]
    assert sections(".jsonl", '{"text": "one"}\n\n{"contents": "two"}\n') == [("", "one"), ("", "two")]
    assert sections(".jsonl", '{"year": 1987.0, "metres": 1.5}') == [("", "year: 1987\nmetres: 1.5")]
    assert sections(".csv", 'name,age\r\n"Dahl, Ann",3\r\nBob,,extra\r\n') == [
        ("Dahl, Ann", "name: Dahl, Ann\nage: 3"),
        ("Bob", "name: Bob\nextra"),
    ]
    assert sections(".tsv", 'title\ttext\nA\tsay "hi\nB\tx,y') == [("A", 'say "hi'), ("B", "x,y")]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_a_csv_has_its_columns_whatever_stands_between_them(delimiter):
    """With semicolons, as spreadsheets write where the comma is in numbers, it was one column."""
    rows = [["title", "text", "price"], ["A; B, C\tD", 'say "hi",\n1;5', "1,5"], ["E", "3,50; 4,50", "2,5"]]
    file = io.StringIO(newline="")
    csv.writer(file, delimiter=delimiter).writerows(rows)
    assert sections(".csv", file.getvalue()) == [(title, text) for title, text, _ in rows[1:]]


def test_commas_and_semicolons_in_a_csv_are_no_columns_by_themselves():
    assert sections(".csv", "note\na, b; c\n") == [("", "note: a\n b; c")]
    assert sections(".csv", "name;age\nBob;3\nAnn, Eve;4;x\n")[0] == ("Bob", "name: Bob\nage: 3")


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("a,b,a\n1,2,3\n", [("", "a: 1\nb: 2\na: 3")]),  # the last column of a name was the only one
        (",b,\n1,2,3\n", [("", "1\nb: 2\n3")]),
        ("title,text,Text,title\nA,one,two,B\nC,,three,\n", [("A", "one\ntwo"), ("C", "three")]),
        ("a,b\n1,2,3,4\n5\n", [("", "a: 1\nb: 2\n3\n4"), ("", "a: 5")]),
        ("\n\na,b\n\n1,2\n", [("", "a: 1\nb: 2")]),
        ("sep=;\r\nname;k\r\nBob;1,5\r\n", [("Bob", "name: Bob\nk: 1,5")]),
        ('"sep=|"\nname|k\nBob|1;5\n', [("Bob", "name: Bob\nk: 1;5")]),
        ("SEP=\t\rname\tk\rBob\t1\r", [("Bob", "name: Bob\nk: 1")]),
        ("sep=\r\nx\r\n", [("", "sep=: x")]),
        ("sep=x,b\n1,2\n", [("", "sep=x: 1\nb: 2")]),
    ],
)  # fmt: skip
def test_each_cell_of_a_csv_is_under_the_name_of_its_column(text, read):
    assert sections(".csv", text) == read


def test_a_cell_may_be_long_and_the_limit_of_the_process_stays():
    limit_before = csv.field_size_limit()
    (row,) = sections(".csv", f"title;text\nA;{'word ' * 40_000}\n")
    assert row[0] == "A" and len(row[1].split()) == 40_000
    with pytest.raises(Unreadable):
        sections(".csv", 'a\n"x')
    assert csv.field_size_limit() == limit_before


@pytest.mark.parametrize(
    ("suffix", "text", "reason"),
    [
        (".json", "[" * 100_000, "not JSON"),
        (".jsonl", '{"text": "a"}\n{', "not JSON, line 2"),
        (".json", r'"\ud83d"', "not JSON"),
        (".csv", 'a,b\n"' + "x" * 200_000, "not a table"),  # nothing closes the quotation
        (".csv", 'a\n"x', "not a table"),
    ],
)
def test_damaged_rows_are_unreadable(suffix, text, reason):
    with pytest.raises(Unreadable) as error:
        sections(suffix, text)
    assert f"{error.value.reason}, {error.value.detail}".startswith(reason)


PYTHON = '''"""Reads things.

More."""
import os
from sys import (
    path,
)

LIMIT = 3  # most


@cache
def load(a):
    """Loads  a
    thing."""
    def inner():
        return a
    return inner


class Reader:
    """A reader."""
    size = 1

    # closes
    @property
    def close(self): return 1

    class Inner:
        def go(self):
            pass


if LIMIT:
    load(os)
'''


def test_python_is_cut_by_its_syntax_tree_and_nothing_is_lost():
    by_head = {s.head.splitlines()[0]: s for s in READERS[".py"](PYTHON, "src/io.py")}
    assert list(by_head) == [
        "# imports: src.io",
        "# function: load",
        "# class: Reader",
        "# method: Reader.close",
        "# class: Reader.Inner",
        "# method: Reader.Inner.go",
        "# module: src.io",
    ]
    assert by_head["# function: load"].head == "# function: load\n# Description: Loads a thing.\n# File: src/io.py\n\n"
    assert (
        by_head["# function: load"].text.startswith("@cache\ndef load(a):")
        and by_head["# function: load"].title == "load"
    )
    assert by_head["# imports: src.io"].text == "import os\nfrom sys import (\n    path,\n)"
    assert by_head["# class: Reader"].text.split("\n")[:3] == ["class Reader:", '    """A reader."""', "    size = 1"]
    assert by_head["# method: Reader.close"].text == "    @property\n    def close(self): return 1"
    assert by_head["# module: src.io"].head.splitlines()[1] == "# Description: Reads things. More."
    lines = sorted(line for s in by_head.values() for line in s.text.split("\n") if line.strip())
    assert lines == sorted(line for line in PYTHON.split("\n") if line.strip())


@pytest.mark.parametrize("text", ["def f(:\n", "(" * 10_000, "-" * 100_000 + "1", "print 'two'"])
def test_what_is_not_python_is_a_text(text):
    assert [(s.title, s.head, s.text) for s in READERS[".py"](text, "a.py")] == [("", "", text)]


def test_half_of_a_surrogate_pair_in_a_docstring_is_replaced():
    """The index of a folder of sources was not built: no UTF-8 file takes it."""
    _, function, _ = READERS[".py"]('def load():\n    """Refuses "\\ud83d"."""\n', "io.py")
    assert function.head.splitlines()[1] == '# Description: Refuses "?".'


LIGATURES = b"/Encoding<</Differences[2/fi/fl/ff/ffi/twosuperior]>>"


def pdf(*pages: bytes) -> bytes:
    """A PDF of content streams, by hand. Codes 2 to 5 are ligatures, as TeX and InDesign set them; 6 is an exponent."""
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects = [b"<</Type/Catalog/Pages 2 0 R>>", f"<</Type/Pages/Kids[{kids}]/Count {len(pages)}>>".encode()]
    objects.append(b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica" + LIGATURES + b">>")
    for i, page in enumerate(pages):
        packed = zlib.compress(page)
        resources = f"/MediaBox[0 0 99 99]/Resources<</Font<</F 3 0 R>>>>/Contents {5 + 2 * i} 0 R>>"
        objects.append(b"<</Type/Page/Parent 2 0 R" + resources.encode())
        objects.append(f"<</Length {len(packed)}/Filter/FlateDecode>>stream\n".encode() + packed + b"\nendstream")
    out, places = io.BytesIO(b"%PDF-1.4\n"), []
    out.seek(0, io.SEEK_END)
    for number, body in enumerate(objects, 1):
        places.append(out.tell())
        out.write(b"%d 0 obj\n%s\nendobj\n" % (number, body))
    start = out.tell()
    out.write(b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1))
    out.writelines(b"%010d 00000 n \n" % place for place in places)
    out.write(b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (len(objects) + 1, start))
    return out.getvalue()


def content_stream(text: str) -> bytes:
    lines = [f"BT /F 12 Tf 9 {700 - 20 * i} Td ({line}) Tj ET" for i, line in enumerate(text.split("\n"))]
    return "\n".join(lines).encode()


def test_a_pdf_is_the_text_of_its_pages():
    assert sections(".pdf", pdf(content_stream("Ann went"), content_stream("to Rome."))) == [("", "Ann went\nto Rome.")]


def test_ligatures_of_a_pdf_are_letters():
    """Nobody types a question with the sign for "ffi". What else has a compatible sign stays, such as the exponent."""
    content = pdf(content_stream("The \\002nal at the \\003ower o\\005ce, 9 m\\006"))
    assert sections(".pdf", content) == [("", "The final at the flower office, 9 m\u00b2")]


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("a retrie-\nval of words", "a retrieval of words"),
        ("a di\\004er-\nence", "a difference"),
        ("re-\ntrie-\nval", "retrieval"),
        ("retrie- \n val", "retrieval"),
        # The document has the word elsewhere
        ("long-\nterm; a long-term plan", "long-term; a long-term plan"),
        ("multi-\nple; multiple", "multiple; multiple"),
        ("self-\nish; selfish", "selfish; selfish"),
        ("re-\nform; re-form, Reform, reform", "reform; re-form, Reform, reform"),
        ("HYPHEN-\nATION; Hyphenation", "HYPHENATION; Hyphenation"),
        # It has not
        ("multi-\nhop, self-\nmade", "multi-hop, self-made"),
        ("Jean-\nPaul, COVID-\n19, 20th-\ncentury", "Jean-Paul, COVID-19, 20th-century"),
        ("state-of-\nthe-art, mother-\nin-law", "state-of-the-art, mother-in-law"),
        ("pre- and post-war, pre-\nand post-war", "pre- and post-war, pre- and post-war"),
        ("the is-\nland", "the island"),
        # No hyphen of a word
        ("1990 -\nwhen -\nso", "1990 -\nwhen -\nso"),
        ("- a\n-\nb --\nc", "- a\n-\nb --\nc"),
    ],
)  # fmt: skip
def test_a_word_that_a_line_of_a_pdf_splits_is_whole(text, read):
    assert sections(".pdf", pdf(content_stream(text))) == [("", read)]


def test_a_pdf_under_aes_without_the_package_that_reads_it_is_not_called_damaged(monkeypatch):
    pypdf = pytest.importorskip("pypdf")

    def opened(content):
        raise pypdf.errors.DependencyError("cryptography>=3.1 is required for AES algorithm")

    monkeypatch.setattr(pypdf, "PdfReader", opened)
    with pytest.raises(Unreadable) as error:
        list(READERS[".pdf"](b"%PDF-1.4", "a.pdf"))
    assert error.value.reason == "an encrypted PDF that needs the package cryptography"


def test_a_word_goes_on_on_the_next_page():
    assert sections(".pdf", pdf(content_stream("the cham-"), content_stream("pion won"))) == [("", "the champion won")]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"%PDF-1.4\ngarbage", "a damaged PDF"),
        (pdf(content_stream("Ann"))[:150], "a damaged PDF"),
        (pdf(content_stream("Ann")).replace(b"/Kids[4 0 R]", b"/Kids[2 0 R]"), "a damaged PDF"),
        (pdf(b" " * (80 << 20)), "a damaged PDF"),  # pypdf's own limit of a stream
        (pdf(b" " * (40 << 20), b" " * (40 << 20)), "a PDF of too much content"),
    ],
    ids=["garbage", "cut off", "circle", "bomb", "bomb in parts"],
)
def test_a_pdf_that_is_damaged_or_unpacks_to_anything_is_unreadable(content, reason):
    pytest.importorskip("pypdf")
    assert len(content) < 100_000
    start = time.perf_counter()
    with pytest.raises(Unreadable) as error:
        list(READERS[".pdf"](content, "a.pdf"))
    assert error.value.reason == reason and time.perf_counter() - start < 20
