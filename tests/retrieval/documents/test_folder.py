"""A folder made into passages: what is read, what is left out and told, ids that stay."""

import json
import os
import shutil
import sys

import pytest

from r3lite.core.errors import R3LiteError
from r3lite.retrieval import index
from r3lite.retrieval.documents import folder as folder_file
from r3lite.retrieval.documents.folder import read_folder
from r3lite.settings import DocumentSettings
from tests.errors import raises

SETTINGS = DocumentSettings(chunk_tokens=32, chunk_overlap=8)


def fill(folder):
    pytest.importorskip("markdown_it", reason="needs the extra documents")
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("Ann Dahl directed Brenn. " * 3 + "It is a film. " * 9, encoding="utf-8")
    (folder / "sub" / "b.MD").write_text("\ufeff# Guide\n\n## Go\nTo Rome.\n", encoding="utf-8")
    (folder / "sub" / "c.py").write_text("def go():\n    '''Goes.'''\n", encoding="utf-8")
    return folder


def test_passages_have_paths_titles_and_budgets(tmp_path):
    folder = read_folder(fill(tmp_path / "docs"), SETTINGS)
    assert folder.files == 3 and folder.skipped == []
    by_path = {d.id.partition("#")[0]: d for d in folder.documents}
    assert list(by_path) == ["a.txt", "sub/b.MD", "sub/c.py"]
    assert by_path["a.txt"].title == "a"  # it names none: that of the file
    assert (by_path["sub/b.MD"].title, by_path["sub/b.MD"].text) == ("Guide > Go", "To Rome.")
    code = by_path["sub/c.py"]
    assert code.title == "go"
    assert code.text == "# function: go\n# Description: Goes.\n# File: sub/c.py\n\ndef go():\n    '''Goes.'''"


def test_ids_are_the_same_elsewhere_and_stay_when_others_change(tmp_path):
    docs_before = read_folder(fill(tmp_path / "one"), SETTINGS).documents
    assert read_folder(fill(tmp_path / "two"), SETTINGS).documents == docs_before
    (tmp_path / "two" / "0.txt").write_text("New.", encoding="utf-8")
    (tmp_path / "two" / "sub" / "b.MD").write_text("# Guide\nIntro.\n## Go\nTo Rome.\n", encoding="utf-8")
    (tmp_path / "two" / "sub" / "c.py").unlink()
    docs_after = read_folder(tmp_path / "two", SETTINGS).documents
    unchanged = [d for d in docs_before if not d.id.startswith("sub/c.py")]
    assert [d for d in docs_after if d in docs_before] == unchanged and len(docs_after) == len(unchanged) + 2
    assert len({d.id for d in docs_after}) == len(docs_after)


def test_what_is_there_twice_is_dropped_and_a_copy_is_told(tmp_path):
    fill(tmp_path)
    count = len(read_folder(tmp_path, SETTINGS).documents)
    shutil.copy(tmp_path / "a.txt", tmp_path / "copy.txt")
    shutil.copy(tmp_path / "sub" / "c.py", tmp_path / "sub" / "z.py")
    folder = read_folder(tmp_path, SETTINGS)
    assert len(folder.documents) == count and folder.files == 3 and folder.duplicates >= 2
    assert [(path, why) for path, why, _ in folder.skipped] == [
        ("copy.txt", "with the same text as other files"),
        ("sub/z.py", "with the same text as other files"),
    ]


def test_what_is_left_out_is_told_with_the_reason(tmp_path, monkeypatch):
    outside = tmp_path / "outside.txt"
    docs = tmp_path / "docs"
    outside.write_text("Secret.", encoding="utf-8")
    fill(docs)
    for name, content in {
        "latin.txt": "Käse ist gut.".encode("latin-1"),
        "nul.txt": b"a\0b",
        "utf16.md": "Title".encode("utf-16"),
        "empty.html": b" \n",
        "picture.png": b"\x89PNG",
        "none": b"x",
        ".hidden.txt": b"x",
        "script.html": b"<script>x</script>",
        "bad.json": b"{",
        "escape\x1b[31m.txt": b"x",
    }.items():
        (docs / name).write_bytes(content)
    (docs / ".git").mkdir()
    (docs / ".git" / "x.txt").write_text("x", encoding="utf-8")
    (docs / "link.txt").symlink_to(outside)
    (docs / "loop").symlink_to(docs)
    for place, vectors in (("old", index.VECTORS), ("grown", "index-2.faiss")):  # the second after `index --add`
        (docs / place).mkdir()
        for name in (vectors, index.MANIFEST):
            (docs / place / name).write_text("{}", encoding="utf-8")
    os.mkfifo(docs / "pipe.txt")
    with open(docs / "large.txt", "wb") as file:
        file.truncate(200 << 20)
    opened = []

    def recorded(path, mode):
        opened.append(path.name)
        return open(path, mode)

    monkeypatch.setattr(folder_file, "open", recorded, raising=False)
    folder = read_folder(docs, SETTINGS)
    assert {path: reason for path, reason, _ in folder.skipped} == {
        "latin.txt": "not in UTF-8",
        "nul.txt": "binary or in UTF-16",
        "utf16.md": "binary or in UTF-16",
        "empty.html": "empty",
        "picture.png": "of an unsupported type",
        "none": "of an unsupported type",
        ".hidden.txt": "hidden",
        "script.html": "without text",
        "bad.json": "not JSON",
        "escape\ufffd[31m.txt": "with an unprintable name",
        ".git/": "hidden",
        "link.txt": "a link",
        "loop/": "a link",
        "old": "an index of r3lite",
        "grown": "an index of r3lite",
        "pipe.txt": "that are pipes or devices",
        "large.txt": "larger than 32 MiB",
    }
    assert folder.files == 3 and "latin.txt" in opened and "large.txt" not in opened and "pipe.txt" not in opened
    assert not any("Secret" in d.text for d in folder.documents)
    assert folder.summary().splitlines()[1] == "skipped     17"
    lines = folder.summary(is_listed=True).splitlines()
    assert lines[0] == "documents   3 (0 duplicate passages)"
    assert lines[1] == "skipped     17, listed in skipped.jsonl of the index"
    assert "  2 of an unsupported type: none, picture.png" in lines


def test_many_names_are_told_by_the_first(tmp_path):
    fill(tmp_path)
    for i in range(5):
        (tmp_path / f"{i}.png").touch()
    assert read_folder(tmp_path, SETTINGS).summary().endswith("  5 of an unsupported type: 0.png, 1.png, 2.png, ...")


def test_a_folder_without_a_document_is_refused_with_what_it_holds(tmp_path):
    (tmp_path / "x.png").touch()
    with pytest.raises(R3LiteError, match=r"1 of an unsupported type: x\.png"):
        read_folder(tmp_path, SETTINGS)
    with raises(R3LiteError, "not-a-folder"):
        read_folder(tmp_path / "x.png", SETTINGS)


def test_long_titles_and_heads_leave_half_the_budget_for_the_text(tmp_path):
    (tmp_path / "a.md").write_text(f"# {'long title ' * 90}\n{' '.join(f'w{i}' for i in range(100))}", encoding="utf-8")
    docs = read_folder(tmp_path, SETTINGS).documents
    assert {d.title[:3] for d in docs} == {"..."} and {len(d.title) for d in docs} == {203}
    assert [len(d.text.split()) for d in docs][:2] == [16, 16] and sum("w50" in d.text for d in docs) in (1, 2)


@pytest.mark.parametrize("end", ["", "\n", " \r\n  "])
def test_soft_hyphens_are_no_part_of_words_in_any_layout(tmp_path, end):
    """A word with one is shown whole, or split at a line's end; no question has it."""
    word = f"Ob\u00adser\u00ad{end}vatory"
    (tmp_path / "a.txt").write_text(f"The {word} opens.", encoding="utf-8", newline="")
    (tmp_path / "b.json").write_text(json.dumps([{"title": f"An {word}", "text": f"An {word}."}]), encoding="utf-8")
    passages = [(d.title, d.text) for d in read_folder(tmp_path, SETTINGS).documents]
    assert passages == [("a", "The Observatory opens."), ("An Observatory", "An Observatory.")]


def test_a_file_that_needs_an_extra_is_named_and_others_do_not(tmp_path, monkeypatch):
    for package in ("markdown_it", "lxml", "pypdf"):
        monkeypatch.setitem(sys.modules, package, None)
    contents = {"a.txt": "one", "b.csv": "k\ntwo", "c.tsv": "k\nthree", "d.json": '["four"]', "e.jsonl": '{"k": 5}'}
    for name, content in (contents | {"f.py": "six = 6"}).items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    assert len(read_folder(tmp_path, SETTINGS).documents) == 6
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "g.md").write_text("seven", encoding="utf-8")
    with raises(R3LiteError, "package-missing", "the Markdown file sub/g.md", "markdown_it") as error:
        read_folder(tmp_path, SETTINGS)
    assert "pip install 'r3lite[documents]'" in error.value.remedy
