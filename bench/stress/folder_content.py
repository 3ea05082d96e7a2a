"""What the files of a folder hold, so that two runs can be compared to the bit."""

import contextlib
import json
import re
from pathlib import Path

NOT_COMPARED = ("seconds", "judge", "resume")  # times, counts of one process, and how it was started


def content(place: Path) -> dict[str, object]:
    """What each file of a folder holds, but for times, speeds and memory: equal if two runs did the same."""
    found: dict[str, object] = {}
    for path in sorted(place.rglob("*")):
        name = path.relative_to(place).as_posix()
        found[f"{name}/" if path.is_dir() else name] = None if path.is_dir() else _read(path)
    return found


def _read(path: Path) -> object:
    if path.name in ("metrics.jsonl", "episodes.jsonl"):
        return [_timeless(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    if path.name == "spans.jsonl":  # times; what there is of each step is the same
        return [len(re.findall('"spanId"', line)) for line in path.read_text(encoding="utf-8").splitlines()]
    if path.name in ("summary.json", "state.json", "scores.json", "history.json"):
        return _timeless(json.loads(path.read_text(encoding="utf-8")))
    if path.name == "manifest.json" and path.parent.name.startswith("checkpoint-"):
        files = json.loads(path.read_text(encoding="utf-8"))
        files["files"].pop("state.json", None)
        return files
    if path.suffix == ".sqlite":
        import sqlite3

        with contextlib.closing(sqlite3.connect(path)) as file:
            assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",), f"{path} is damaged"
            return sorted(file.execute("SELECT key, vector FROM queries").fetchall())
    if path.suffix == ".html":
        text = path.read_text(encoding="utf-8")
        before, mark, after = text.partition("written on ")
        return before + after[len("2026-01-01 at 00:00:00") :] if mark else text
    return path.read_bytes()


def _timeless(value):
    from r3lite.training.metrics import repeatable

    if isinstance(value, dict):
        return {k: _timeless(v) for k, v in repeatable(value).items() if k not in NOT_COMPARED}
    return value


def differences(one: dict[str, object], other: dict[str, object]) -> list[str]:
    """Names of files that only one has, or that differ."""
    found = [f"only uninterrupted: {name}" for name in one.keys() - other.keys()]
    found += [f"only resumed: {name}" for name in other.keys() - one.keys()]
    found += [f"differs: {name}" for name in one.keys() & other.keys() if one[name] != other[name]]
    return sorted(found)
