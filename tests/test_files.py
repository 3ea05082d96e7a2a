"""Files are written whole or not at all, a place has one writer at a time, and a bad line is named."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from r3lite.core import files
from r3lite.core.errors import R3LiteError, explained, reason
from r3lite.core.files import (
    LOCK,
    append_jsonl,
    content_fingerprint,
    folder_fingerprint,
    names_in,
    read_jsonl,
    read_text,
    recover_jsonl,
    similar_path,
    sole_writer,
    sweep,
    write_json,
    write_jsonl,
    write_text,
)
from tests.errors import raises


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


@pytest.mark.parametrize("write", [lambda path: append_jsonl(path, [{"id": 1}]), lambda path: write_text(path, "new")])
def test_what_is_written_is_on_the_disk_before_the_call_returns(tmp_path, monkeypatch, write):
    """Else a power cut loses lines that the user was told of, or leaves an empty file in the place of the old one."""
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.fstat(descriptor).st_size))
    write(tmp_path / "a")
    assert flushed == [(tmp_path / "a").stat().st_size] != [0]


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
        r"line 2: contains half of a surrogate pair ('\ud83d')",
        r"line 3: contains half of a surrogate pair ('\ude00')",
    ]


def test_files_that_cannot_be_read(tmp_path):
    with raises(R3LiteError, "file-unreadable", "gone"):
        list(read_jsonl(tmp_path / "gone"))
    (tmp_path / "latin").write_bytes('{"a": "é"}'.encode("latin-1"))
    with raises(R3LiteError, "not-utf8"):
        list(read_jsonl(tmp_path / "latin"))


def test_a_path_that_is_mistyped_is_told_with_the_nearest_one(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "notes.jsonl").touch()
    (tmp_path / "runs" / LOCK).touch()
    monkeypatch.chdir(tmp_path)
    assert similar_path("rnus") == " (did you mean runs?)"
    nearest = Path("runs", "notes.jsonl")
    assert similar_path("runs/note.jsonl") == f" (did you mean {nearest}?)"
    with raises(R3LiteError, "file-unreadable", "No such file", nearest, "Mend it."):
        read_text("runs/note.jsonl", "Mend it.")
    for path in ("runs/.lokc", "runs/other", "elsewhere/notes.jsonl", "", "a\0b"):
        assert similar_path(path) == ""


def test_a_file_that_is_read_whole_has_a_size(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("12345", encoding="utf-8")
    monkeypatch.setattr(files, "MAX_TEXT", 5)
    assert files.read_text(tmp_path / "a", "") == "12345"
    monkeypatch.setattr(files, "MAX_TEXT", 4)
    with raises(R3LiteError, "file-too-large"):
        files.read_text(tmp_path / "a", "")


def test_windows_line_ends_and_byte_order_marks(tmp_path):
    (tmp_path / "a").write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"b": 2}\r\n')
    assert [record for _, record in lines(tmp_path / "a")] == [{"a": 1}, {"b": 2}]


def test_a_line_separator_inside_a_string_is_no_line_end(tmp_path):
    """str.splitlines cuts at U+2028 and U+0085, which JSON allows inside a string."""
    (tmp_path / "a").write_text('{"a": "x\u2028y\u0085z"}\n', encoding="utf-8")
    assert lines(tmp_path / "a") == [(1, {"a": "x\u2028y\u0085z"})]


# Links


posix = pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")


@posix
@pytest.mark.parametrize(
    "write", [lambda path: write_text(path, '{"id": 1}\n'), lambda p: append_jsonl(p, [{"id": 1}])]
)
def test_a_link_is_written_through(tmp_path, write):
    (tmp_path / "link").symlink_to(tmp_path / "new" / "target")  # dangling
    (tmp_path / "link 2").symlink_to(tmp_path / "link")
    write(tmp_path / "link 2")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "link 2").is_symlink()
    assert (tmp_path / "new" / "target").read_text() == '{"id": 1}\n'
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError, match="loop"):
        write(tmp_path / "loop")
    assert (tmp_path / "loop").is_symlink()


def test_what_a_kill_has_left_is_swept_and_nothing_else(tmp_path):
    """Only run folders were swept once: each kill of another command left a file for good."""
    ours = [".out.new.part/x", ".out.17.part", "out/.a.json.17.part", "out/cache/.b.17.part", ".rows.jsonl.17.part"]
    foreign = ["out/.keep", "out/a.part", "rows.jsonl", ".rows.jsonl.cache.17.part", ".outer.17.part", "x.part"]
    for name in (*ours, *foreign):
        write_text(tmp_path / name, "")
    sweep(tmp_path / "out", tmp_path / "rows.jsonl", tmp_path / "absent")
    remaining_files = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    assert remaining_files == set(foreign) and not (tmp_path / ".out.new.part").exists()


# One writer


HOLDER = """
import sys, time
from r3lite.core.files import sole_writer
with sole_writer(sys.argv[1], folder=sys.argv[2] == "folder"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on Windows")
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_second_process_is_refused_until_the_first_is_gone_even_if_it_was_killed(tmp_path, kind):
    output = tmp_path / "new" / "out"
    argv = [sys.executable, "-c", HOLDER, str(output), kind]
    holder = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent)
    assert holder.stdout.readline() == "held\n"
    try:
        message = rf"another process \(pid {holder.pid}\) writes to .*out"
        with pytest.raises(R3LiteError, match=message) as error, sole_writer(output, folder=kind == "folder"):
            pass
        assert "pass another output" in error.value.remedy and "--" not in error.value.remedy  # or --teacher-logprobs
    finally:
        holder.kill()
        holder.communicate()
    with sole_writer(output, folder=kind == "folder"):
        assert names_in(output) == set()
    assert list((tmp_path / "new").iterdir()) == (
        [output] if kind == "folder" else []
    )  # the killed one made the folder


def test_what_was_made_for_the_lock_is_removed_and_nothing_else(tmp_path):
    with sole_writer(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
    assert list(tmp_path.iterdir()) == []
    with sole_writer(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "x").write_text("")
    assert [p.name for p in (tmp_path / "a" / "b").iterdir()] == ["x"]
    with pytest.raises(ZeroDivisionError), sole_writer(tmp_path / "c" / "d.jsonl", folder=False):
        raise ZeroDivisionError
    assert not (tmp_path / "c").exists()


def test_a_lock_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    with monkeypatch.context() as full:
        full.setattr(os, "write", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with raises(R3LiteError, "output-unwritable", "No space left"), sole_writer(tmp_path / "a" / "b"):
            pass
    assert list(tmp_path.iterdir()) == []
    with sole_writer(tmp_path / "a" / "b"):
        pass


@posix
def test_a_link_and_what_it_leads_to_are_one_place(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    refused = raises(R3LiteError, "output-in-use")
    with sole_writer(tmp_path / "link"), refused, sole_writer(tmp_path / "folder"):
        pass


@posix
def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, capsys):
    import fcntl

    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with sole_writer(tmp_path / "out"):
        assert "cannot be locked (No locks available): let no other" in capsys.readouterr().err


@posix
def test_a_lock_that_its_owner_removes_meanwhile_is_made_anew(tmp_path, monkeypatch):
    """Else two processes would each hold a lock: one on the file that is there, one on the file that was."""
    import fcntl

    flock = fcntl.flock
    descriptors = []

    def late(descriptor, operation):
        if not descriptors:
            (tmp_path / "out" / ".lock").unlink()
        descriptors.append(descriptor)
        flock(descriptor, operation)

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", late)
        with sole_writer(tmp_path / "out"):
            assert (tmp_path / "out" / ".lock").read_text().strip() == str(os.getpid())
    assert len(descriptors) >= 2


def test_what_holds_no_output_is_not_in_the_way(tmp_path):
    for name in (".lock", ".config.toml.12.part", "part", ".gitignore"):
        (tmp_path / name).write_text("")
    assert names_in(tmp_path) == {"part", ".gitignore"} and names_in(tmp_path / "none") == set()


# Recovering


def recovered(path, confirmed=False) -> list[dict]:
    return recover_jsonl(path, lambda record: record.keys() == {"id", "x"}, "us", confirmed)


def test_a_torn_line_is_removed_only_from_a_file_that_is_known_to_be_ours(tmp_path):
    """A user's own file that began as ours do lost its last line."""
    path = tmp_path / "a.jsonl"
    full_line = b'{"id": "1", "x": 2}\n'
    for content in (b'{"id": "1", "x', b'{"id": "1", "y": 2}\n{"id": ', b"text\n{", full_line + b"text"):
        path.write_bytes(content)
        with pytest.raises(R3LiteError, match=r"a\.jsonl exists, and its line \d was not written by us"):
            recovered(path)
        assert path.read_bytes() == content
    path.write_bytes(b'{"id": "1", "x')
    assert recovered(path, confirmed=True) == [] and path.read_bytes() == b""
    path.write_bytes(full_line + b'{"id": "2')
    assert recovered(path) == [{"id": "1", "x": 2}] and path.read_bytes() == full_line


# Fingerprints


def test_a_fingerprint_tells_what_was_changed_in_place_and_not_where_it_lies(tmp_path):
    original = tmp_path / "one"
    copy = tmp_path / "other"
    for folder in (original, copy):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(bytes(100_000))
        (folder / "README.md").write_text(folder.name)
    fingerprint = folder_fingerprint(original)
    assert folder_fingerprint(copy) == fingerprint
    changes = {
        "config.json": b"[]",
        "tokenizer.json": b"{}",
        "model.safetensors": bytes(99_999) + b"\1",
        "b.safetensors": b"",
    }
    for name, content in changes.items():
        old_content = (original / name).read_bytes() if (original / name).exists() else None
        (original / name).write_bytes(content)
        assert folder_fingerprint(original) != fingerprint
        (original / name).unlink() if old_content is None else (original / name).write_bytes(old_content)
    assert folder_fingerprint(original) == fingerprint


def test_a_fingerprint_of_large_weights_reads_a_sample_of_all_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PIECE", 10)
    monkeypatch.setattr(files, "PIECES", 4)
    weights = tmp_path / "model.safetensors"
    fingerprints = []
    for place in range(0, 1000, 10):
        content = bytearray(1000)
        content[place : place + 10] = b"x" * 10
        weights.write_bytes(content)
        fingerprints.append(folder_fingerprint(tmp_path))
    assert len(set(fingerprints)) == 1 + 4


def test_the_content_of_files_and_folders_is_told_apart(tmp_path, monkeypatch):
    folder = tmp_path / "a"
    (folder / "b").mkdir(parents=True)
    (folder / "one").write_bytes(bytes(200_000))
    (folder / "b" / "two").write_bytes(b"x")
    fingerprints = [content_fingerprint(folder)]
    (folder / ".lock").write_bytes(b"y")
    assert content_fingerprint(folder) == fingerprints[0] and content_fingerprint(folder / "one") != fingerprints[0]
    with (folder / "one").open("r+b") as file:
        file.seek(123_456)
        file.write(b"z")
    fingerprints.append(content_fingerprint(folder))
    (folder / "b" / "two").rename(folder / "b" / "three")
    fingerprints.append(content_fingerprint(folder))
    monkeypatch.setattr(files, "MAX_TEXT", 100)  # above which a file is read in pieces
    for content in (bytes(200_001), bytes(200_000) + b"z"):
        (folder / "one").write_bytes(content)
        fingerprints.append(content_fingerprint(folder))
    assert len(set(fingerprints)) == 5


def test_an_error_of_the_system_is_told_without_its_number():
    with (
        raises(R3LiteError, "x", "a.txt cannot be read: No such file or directory\n") as error,
        explained(OSError, "a.txt cannot be read", "Look.", code="x"),
    ):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "a.txt")
    assert "Errno" not in str(error.value)
    with (
        raises(R3LiteError, "x", "the run cannot be written: No space left on device: b.txt"),
        explained(OSError, "the run cannot be written", "", code="x"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device", "b.txt")
    assert reason(ConnectionError("it hung\nup")) == "it hung up" and reason(ValueError()) == "ValueError"
