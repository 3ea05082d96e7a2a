"""Reads the files of a folder without what differs from run to run, so that two runs can be compared bit for bit."""

import contextlib
import json
import re
from pathlib import Path

# Keys of JSON files that are left out: times, counts of one process, and whether the run was resumed.
NOT_COMPARED = ("seconds", "judge", "resume")
REPORT_DATE = "2026-01-01 at 00:00:00"  # the form of the date in a report, which follows "written on "


def content(folder: Path) -> dict[str, object]:
    """Returns the content of each file of a folder by relative path; folders end with "/" and have the content None.

    Times, speeds and memory are left out: if two runs did the same, their contents are equal.
    """
    contents: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            contents[f"{name}/"] = None
        else:
            contents[name] = _read(path)
    return contents


def _read(path: Path) -> object:
    """Returns the part of a file's content that must be the same in every run, as a type that suits the file."""
    if path.name in ("metrics.jsonl", "episodes.jsonl"):
        return [_without_times(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    if path.name == "spans.jsonl":  # all its values are times; the number of spans of each step is the same
        return [len(re.findall('"spanId"', line)) for line in path.read_text(encoding="utf-8").splitlines()]
    if path.name in ("summary.json", "state.json", "scores.json", "history.json"):
        return _without_times(json.loads(path.read_text(encoding="utf-8")))
    if path.name == "manifest.json" and path.parent.name.startswith("checkpoint-"):
        manifest = json.loads(path.read_text(encoding="utf-8"))
        manifest["files"].pop("state.json", None)  # its digest, which changes with the times in it
        return manifest
    if path.suffix == ".sqlite":
        import sqlite3

        with contextlib.closing(sqlite3.connect(path)) as database:
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",), f"{path} is damaged"
            return sorted(database.execute("SELECT key, vector FROM queries").fetchall())
    if path.suffix == ".html":
        text = path.read_text(encoding="utf-8")
        before_date, mark, from_date = text.partition("written on ")
        return before_date + from_date[len(REPORT_DATE) :] if mark else text
    return path.read_bytes()


def _without_times(value):
    """Returns a JSON value without times and what else differs from run to run."""
    from r3lite.training.metrics import repeatable

    if isinstance(value, dict):
        return {key: _without_times(item) for key, item in repeatable(value).items() if key not in NOT_COMPARED}
    return value


def differences(uninterrupted: dict[str, object], resumed: dict[str, object]) -> list[str]:
    """Returns a line for each file that only one of two contents has, or that differs between them."""
    lines = [f"only uninterrupted: {name}" for name in uninterrupted.keys() - resumed.keys()]
    lines += [f"only resumed: {name}" for name in resumed.keys() - uninterrupted.keys()]
    for name in uninterrupted.keys() & resumed.keys():
        if uninterrupted[name] != resumed[name]:
            lines.append(f"differs: {name}")
    return sorted(lines)
