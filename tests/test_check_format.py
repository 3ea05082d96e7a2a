"""A format's sample episode, and how a turn of one's own is read."""

import re
import tomllib

import pytest

from r3lite import check_format
from r3lite.protocols.registry import PROTOCOLS
from tests.protocols.test_own import DATA
from tests.test_docs import FORMATS

OWN = [str(DATA / "own_tags.toml"), str(DATA / "own_headings.toml")]


@pytest.mark.parametrize(
    ("name", "extra_flags"),
    [*((name, []) for name in (*PROTOCOLS, *OWN)), *((name, ["--verification"]) for name in ("r3", OWN[1]))],
)
def test_the_sample_of_a_format_is_without_faults(capsys, name, extra_flags):
    assert check_format.main(["--format", name, *extra_flags]) == 0
    stdout = capsys.readouterr().out
    assert "fault" not in stdout and "answer: the answer in a few words" in stdout
    assert ("query: one short question" in stdout) == (name != "solution")
    assert ("verification: which documents" in stdout) == bool(extra_flags)


def test_a_turn_of_ones_own_is_read_and_its_faults_are_told(tmp_path, capsys):
    turn = tmp_path / "turn.txt"
    turn.write_text("<ask> Who? </ask> and more")
    assert check_format.main(["--format", OWN[0], "--turn", str(turn)]) == 0
    stdout = capsys.readouterr().out
    assert "query: Who?" in stdout and "fault no_think: it has no thinking before its query or answer" in stdout
    turn.write_text("A: Ann\nThe final answer: Oslo")
    assert check_format.main(["--format", "dag", "--step", "2", "--turn", str(turn)]) == 0
    assert "fault early_answer: it gives the final answer before" in capsys.readouterr().out
    turn.write_text("hm")
    assert check_format.main(["--format", "dag", "--turn", str(turn)]) == 0
    assert "the episode ends as malformed" in capsys.readouterr().out


def test_a_turn_that_is_not_there(tmp_path, capsys):
    assert check_format.main(["--turn", str(tmp_path / "none.txt")]) == 1
    assert "none.txt: no such file" in capsys.readouterr().err


def test_the_files_of_the_page_are_read(tmp_path, capsys):
    blocks = re.findall(r"```toml\n(kind = .*?)\n```", FORMATS.read_text(encoding="utf-8"), re.DOTALL)
    assert [tomllib.loads(text)["kind"] for text in blocks] == ["tags", "headings"]
    for text in blocks:
        (tmp_path / "mine.toml").write_text(text)
        assert check_format.main(["--format", str(tmp_path / "mine.toml")]) == 0
        assert "fault" not in capsys.readouterr().out
