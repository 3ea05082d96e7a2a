"""What strangers wrote does not steer the terminal: passages, procedures, and servers whose errors are quoted."""

import json

import pytest

from r3lite import procedures, retrieve
from r3lite.core.processes import say_error
from r3lite.core.terminal import printable

HOSTILE = "\x1b[31mred\x07 \x9b2J\u202eback\r\x08"


def steers(text: str) -> bool:
    return any(not c.isprintable() and c != "\n" for c in text)


def test_control_characters_become_spaces_and_lines_stay():
    assert printable("a\x1b[31mb\nc\td\u202e") == "a [31mb\nc d "
    assert steers(HOSTILE) and not steers(printable(HOSTILE))


def test_passages_of_retrieve(tmp_path, capsys):
    passage = {"id": f"1{HOSTILE}", "title": f"Blue {HOSTILE}", "text": f"Blue Harbor {HOSTILE} was directed by Ada."}
    (tmp_path / "c.jsonl").write_text(json.dumps(passage) + "\n", encoding="utf-8")
    flags = ["--corpus", str(tmp_path / "c.jsonl"), "--encoder", "hashing", "--query", "Blue Harbor"]
    assert retrieve.main(flags) == 0
    stdout = capsys.readouterr().out
    assert "Blue Harbor" in stdout and not steers(stdout)


@pytest.mark.parametrize("flags", [[], ["--match", "a lease", "--procedures-by", "triggers"]])
def test_procedures(tmp_path, capsys, flags):
    row = {"name": f"A{HOSTILE}", "description": HOSTILE, "trigger": "lease", "steps": [{"action": HOSTILE}]}
    (tmp_path / "p.json").write_text(json.dumps(row))
    assert procedures.main(["--procedures", str(tmp_path / "p.json"), *flags]) == 0
    stdout = capsys.readouterr().out
    assert "red" in stdout and not steers(stdout)


def test_errors(capsys):
    say_error(f"the server says {HOSTILE}")
    stderr = capsys.readouterr().err
    assert "the server says" in stderr and "red" in stderr and not steers(stderr)
