"""The command procedures: listing, adding, matching, and what it refuses."""

import json

import pytest

from r3lite import procedures
from tests.test_docs import ROOT

PAGE = ROOT / "docs" / "procedures.md"


@pytest.fixture
def mine(tmp_path):
    """The file of the page."""
    page = PAGE.read_text(encoding="utf-8")
    path = tmp_path / "mine.json"
    path.write_text(page.split("```json\n")[1].split("```")[0])
    return path


def told(capsys, *argv, status=0):
    assert procedures.main([str(a) for a in argv]) == status
    shown = capsys.readouterr()
    return shown.err if status else shown.out


def test_the_file_of_the_page_is_listed(mine, capsys):
    shown = told(capsys, "--procedures", mine)
    assert "Lease of land (contracts, priority 2, steps: 2)" in shown and "triggers: lease, rent of land" in shown
    assert f"procedures in {mine}: 1, all valid" in shown


def test_what_fits_is_shown_as_the_page_says(mine, capsys):
    shown = told(capsys, "--procedures", mine, "--match", "Who signed the lease?", "--procedures-by", "triggers")
    assert "    11.0       -  Lease of land" in shown
    assert shown.split("\n\n")[1].strip() in PAGE.read_text(encoding="utf-8")
    shown = told(capsys, "--procedures", mine, "--match", "Where is Oslo?", "--encoder", "hashing")
    assert "     0.0   0.000  Lease of land" in shown and procedures.NO_MATCH in shown


def test_others_are_added_and_none_twice(mine, tmp_path, capsys):
    one = {"name": "Films", "description": "about films", "steps": [{"action": "Search"}]}
    (tmp_path / "more.json").write_text(json.dumps(one))
    assert "all valid" in told(capsys, "--procedures", mine, "--add", tmp_path / "more.json")
    kept = mine.read_text()
    assert [p["name"] for p in json.loads(kept)] == ["Lease of land", "Films"]
    err = told(capsys, "--procedures", mine, "--add", tmp_path / "more.json", status=1)
    assert "already has a procedure named Films" in err and mine.read_text() == kept
    (tmp_path / "bad.json").write_text("{")
    assert "bad.json: not JSON" in told(capsys, "--procedures", mine, "--add", tmp_path / "bad.json", status=1)
    assert mine.read_text() == kept
    new = tmp_path / "new.json"
    assert "added 1" in told(capsys, "--procedures", new, "--add", tmp_path / "more.json") and new.exists()


def test_what_is_missing_is_told(tmp_path, capsys):
    assert "--procedures is missing" in told(capsys, status=2)
    assert "none.json cannot be read" in told(capsys, "--procedures", tmp_path / "none.json", status=1)
    assert "--output is y, but has no effect" in told(capsys, "--procedures", "x", "--output", "y", status=2)


def test_a_folder_of_procedures_is_read_file_by_file(mine, tmp_path, capsys):
    folder, row = tmp_path / "folder", json.loads(mine.read_text())[0]
    folder.mkdir()
    assert "has no *.json file" in told(capsys, "--procedures", folder, status=1)
    for name in ("a", "b"):
        (folder / f"{name}.json").write_text(json.dumps(row | {"name": name}))
    shown = told(capsys, "--procedures", folder)
    assert shown.startswith("a (contracts") and "\nb (contracts" in shown and "all valid" in shown
    assert "copy" in told(capsys, "--procedures", folder, "--add", mine, status=2)
    (folder / "c.json").write_text(json.dumps(row | {"name": "A"}))
    error = told(capsys, "--procedures", folder, status=1)
    assert "two procedures are named A" in error and "c.json" in error
