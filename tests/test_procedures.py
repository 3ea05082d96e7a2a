"""The command procedures: listing, adding, matching, and what it refuses."""

import json

import pytest

from r3lite import procedures
from tests.test_docs import ROOT

PAGE = ROOT / "docs" / "procedures.md"


@pytest.fixture
def procedures_file(tmp_path):
    """The file of the page."""
    page = PAGE.read_text(encoding="utf-8")
    path = tmp_path / "mine.json"
    path.write_text(page.split("```json\n")[1].split("```")[0])
    return path


def output_of(capsys, *argv, status=0):
    assert procedures.main([str(a) for a in argv]) == status
    captured = capsys.readouterr()
    return captured.err if status else captured.out


def test_the_file_of_the_page_is_listed(procedures_file, capsys):
    stdout = output_of(capsys, "--procedures", procedures_file)
    assert "Lease of land (contracts, priority 2, steps: 2)" in stdout and "triggers: lease, rent of land" in stdout
    assert f"procedures in {procedures_file}: 1, all valid" in stdout


def test_what_fits_is_shown_as_the_page_says(procedures_file, capsys):
    stdout = output_of(
        capsys, "--procedures", procedures_file, "--match", "Who signed the lease?", "--procedures-by", "triggers"
    )
    assert "    11.0       -  Lease of land" in stdout
    assert stdout.split("\n\n")[1].strip() in PAGE.read_text(encoding="utf-8")
    stdout = output_of(capsys, "--procedures", procedures_file, "--match", "Where is Oslo?", "--encoder", "hashing")
    assert "     0.0   0.000  Lease of land" in stdout and procedures.NO_MATCH in stdout


def test_others_are_added_and_none_twice(procedures_file, tmp_path, capsys):
    one = {"name": "Films", "description": "about films", "steps": [{"action": "Search"}]}
    (tmp_path / "more.json").write_text(json.dumps(one))
    assert "all valid" in output_of(capsys, "--procedures", procedures_file, "--add", tmp_path / "more.json")
    content = procedures_file.read_text()
    assert [p["name"] for p in json.loads(content)] == ["Lease of land", "Films"]
    err = output_of(capsys, "--procedures", procedures_file, "--add", tmp_path / "more.json", status=1)
    assert "already has a procedure named Films" in err and procedures_file.read_text() == content
    (tmp_path / "bad.json").write_text("{")
    assert "bad.json: not JSON" in output_of(
        capsys, "--procedures", procedures_file, "--add", tmp_path / "bad.json", status=1
    )
    assert procedures_file.read_text() == content
    new = tmp_path / "new.json"
    assert "added 1" in output_of(capsys, "--procedures", new, "--add", tmp_path / "more.json") and new.exists()


def test_what_is_missing_is_told(tmp_path, capsys):
    assert "--procedures is missing" in output_of(capsys, status=2)
    assert "none.json cannot be read" in output_of(capsys, "--procedures", tmp_path / "none.json", status=1)
    assert "--output is y, but has no effect" in output_of(capsys, "--procedures", "x", "--output", "y", status=2)


def test_a_folder_of_procedures_is_read_file_by_file(procedures_file, tmp_path, capsys):
    folder, row = tmp_path / "folder", json.loads(procedures_file.read_text())[0]
    folder.mkdir()
    assert "has no *.json file" in output_of(capsys, "--procedures", folder, status=1)
    for name in ("a", "b"):
        (folder / f"{name}.json").write_text(json.dumps(row | {"name": name}))
    stdout = output_of(capsys, "--procedures", folder)
    assert stdout.startswith("a (contracts") and "\nb (contracts" in stdout and "all valid" in stdout
    assert "copy" in output_of(capsys, "--procedures", folder, "--add", procedures_file, status=2)
    (folder / "c.json").write_text(json.dumps(row | {"name": "A"}))
    error = output_of(capsys, "--procedures", folder, status=1)
    assert "two procedures are named A" in error and "c.json" in error
