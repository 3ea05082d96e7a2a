"""Files are written whole or not at all; a bad line is named."""

import json
import os

import pytest

from r3lite.errors import R3LiteError
from r3lite.files import read_jsonl, write_json, write_jsonl, write_text


def lines(path, on_bad=None) -> list[tuple[int, dict]]:
    """Number and object of each line."""
    return [(int(r.source.where.split()[-1]), r.values) for r in read_jsonl(path, on_bad=on_bad)]


def test_what_is_written_is_read_back(tmp_path):
    records = [{"a": "é\u2028東\n"}, {"b": [1, None, 2.5]}]
    write_jsonl(tmp_path / "new" / "folder" / "a.jsonl", records)
    assert lines(tmp_path / "new" / "folder" / "a.jsonl") == [(1, records[0]), (2, records[1])]
    write_json(tmp_path / "a.json", records)
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == records


def test_line_ends_are_the_same_on_every_system(tmp_path):
    write_text(tmp_path / "a", "x\ny\n")
    assert (tmp_path / "a").read_bytes() == b"x\ny\n"


@pytest.mark.parametrize("broken", ["replace", "fsync"])
def test_a_crash_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, broken):
    write_text(tmp_path / "a", "old")

    def crash(*arguments):
        raise OSError("crash")

    monkeypatch.setattr(os, broken, crash)
    with pytest.raises(OSError, match="crash"):
        write_text(tmp_path / "a", "new")
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_a_record_that_is_not_json_leaves_the_old_file(tmp_path):
    write_jsonl(tmp_path / "a", [{"a": 1}])
    with pytest.raises(TypeError):
        write_jsonl(tmp_path / "a", [{"a": 2}, {"b": object()}])
    assert lines(tmp_path / "a") == [(1, {"a": 1})]


@pytest.mark.parametrize(
    ("line", "reason"), [('{"a": 1', "not JSON"), ("[1]", "not a JSON object"), ('"x"', "not a JSON object")]
)
def test_a_bad_line_is_named_by_file_line_and_reason(tmp_path, line, reason):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"a": 1}}\n\n{line}\n{{"b": 2}}\n')
    with pytest.raises(R3LiteError, match=rf"rows\.jsonl, line 3: {reason}"):
        list(read_jsonl(path))
    bad = []
    assert lines(path, bad.append) == [(1, {"a": 1}), (4, {"b": 2})]
    assert len(bad) == 1 and "line 3" in str(bad[0])


def test_half_of_a_surrogate_pair_is_a_bad_line(tmp_path):
    """Such text stopped tokenizers and every file that it was written to with a traceback, far from its line."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": "\\ud83d\\ude00 \\\\ud83d"}\n{"a": ["\\uD83D"]}\n{"\\ude00": 1}\n')
    bad = []
    assert lines(path, bad.append) == [(1, {"a": "\U0001f600 \\ud83d"})]
    assert [error.cause.partition(", ")[2] for error in bad] == [
        r"line 2: it holds half of a surrogate pair ('\ud83d')",
        r"line 3: it holds half of a surrogate pair ('\ude00')",
    ]


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(R3LiteError, match="gone"):
        list(read_jsonl(tmp_path / "gone"))
    (tmp_path / "latin").write_bytes('{"a": "é"}'.encode("latin-1"))
    with pytest.raises(R3LiteError, match="UTF-8"):
        list(read_jsonl(tmp_path / "latin"))


def test_windows_line_ends_and_byte_order_marks(tmp_path):
    (tmp_path / "a").write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"b": 2}\r\n')
    assert [record for _, record in lines(tmp_path / "a")] == [{"a": 1}, {"b": 2}]


def test_a_line_separator_inside_a_string_is_no_line_end(tmp_path):
    """str.splitlines cuts at U+2028 and U+0085, which JSON allows inside a string."""
    (tmp_path / "a").write_text('{"a": "x\u2028y\u0085z"}\n', encoding="utf-8")
    assert lines(tmp_path / "a") == [(1, {"a": "x\u2028y\u0085z"})]
