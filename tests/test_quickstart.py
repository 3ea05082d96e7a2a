"""`quickstart`: what it refuses before the first stage."""

import pytest

from r3lite import quickstart


@pytest.mark.parametrize("name", ["used", "used/file"])
def test_an_output_that_is_in_use_is_refused_at_once(tmp_path, monkeypatch, capsys, name):
    """It did three stages again and stopped at the fourth, with advice that named a flag it does not have."""
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("x")
    monkeypatch.setattr(quickstart, "run_stage", lambda *_: pytest.fail("a stage began"))
    assert quickstart.main(["--output", str(tmp_path / name)]) == 1
    error = capsys.readouterr().err
    assert f"--output {tmp_path / name} exists and is not an empty folder" in error and "Name a new one" in error
