"""Stores the runs of benches in JSON files, with the conditions of each run, and shows them as pages in Markdown.

A JSON file has the runs of one bench on one kind of device: `{"runs": [...]}`, in the order of time. A run has the
records of one section (a kind of work such as "decode") that were measured at one time. Later runs never replace
earlier ones. A field that early runs did not record has the value NOT_RECORDED.
"""

import json
import subprocess
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from r3lite.core.files import read_record, write_text
from r3lite.devices import machine
from r3lite.devices.precision import Precision, dtype_name

NOT_RECORDED = "not recorded"
CONDITIONS = ("precision", "processor", "threads")  # `ranges` groups runs in which these fields are equal
# The packages whose versions are recorded.
PACKAGES = ("torch", "transformers", "peft", "trl", "sentence-transformers")
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Bench:
    """A bench: the name of its files, the title of its page, and the columns by which its runs are compared."""

    name: str
    title: str
    keys: tuple[str, ...]  # columns that say what was measured: records in which they are equal are compared
    figures: tuple[str, ...]  # columns with measured numbers: their ranges over all runs are shown


def provenance(precision: Precision) -> dict:
    """Returns the conditions of a measurement that starts now: the date, the code, the machine and the precision."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(ROOT),
        "processor": processor(precision.device.type),
        "threads": torch.get_num_threads(),
        "precision": dtype_name(precision.dtype),
        "versions": {name: version(name) for name in PACKAGES},
    }


def commit(folder: Path) -> str:
    """Returns the commit that is checked out in a folder, or "not in git".

    "+dirty" is appended if tracked files outside bench/results differ from the commit.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)bench/results")
        return git("rev-parse", "HEAD") + ("+dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):  # git is not installed, or the folder is no checkout
        return "not in git"


def processor(device: str) -> str:
    """Returns the name of the CUDA device or, for "cpu", of the processor."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return machine.processor()


def version(package: str) -> str:
    """Returns the version of an installed package, or "not installed"."""
    try:
        return torch.__version__ if package == "torch" else metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def read(path: Path) -> list[dict]:
    """Returns the runs of a file, oldest first; an empty list if the file does not exist."""
    remedy = "Move the file away, or name another folder with --results."
    return read_record(path, remedy).items("runs") if path.exists() else []


def keep(folder: Path, device: str, bench: Bench, run: dict) -> None:
    """Adds a run to the bench's JSON file, and writes the bench's page again.

    May be called again while the run goes on: the run then replaces the stored run with the same section and date.
    """
    path = folder / f"{bench.name}-{device}.json"
    write_text(path.with_suffix(".md"), markdown(bench, add(path, run)))


def add(path: Path, run: dict) -> list[dict]:
    """Adds a run to a JSON file as `keep` does, and returns all runs of the file."""
    identity = (run["section"], run["date"])
    runs = [recorded for recorded in read(path) if (recorded["section"], recorded["date"]) != identity]
    runs.append(run)
    write_text(path, json.dumps({"runs": runs}, indent=1) + "\n")
    return runs


def markdown(bench: Bench, runs: list[dict]) -> str:
    """Returns the page: for each section a table of ranges over its runs, then the runs themselves, newest first."""
    parts = [f"# {bench.title}"]
    for section in dict.fromkeys(run["section"] for run in runs):
        section_runs = [run for run in runs if run["section"] == section]
        parts += [f"## {section}", f"Over all {len(section_runs)} runs, none left out:"]
        parts.append(table(ranges(bench, section_runs)))
        for run in reversed(section_runs):
            parts += [f"### {section}, {run['date']}", conditions(run), run["note"], table(run["records"])]
    return "\n\n".join(part for part in parts if part) + "\n"


def ranges(bench: Bench, runs: list[dict]) -> list[dict]:
    """Returns a row for each group of records with equal keys and conditions.

    A row has the number of records in the group, and for each figure the smallest and the largest value.
    """
    groups: dict[str, list[dict]] = {}  # JSON of the keys and conditions -> records
    for run in runs:
        for record in run["records"]:
            group = {name: record[name] for name in bench.keys if name in record}
            group |= {name: run[name] for name in CONDITIONS}
            groups.setdefault(json.dumps(group), []).append(record)
    rows = []
    for group_json, records in groups.items():
        ranges_row = {**json.loads(group_json), "runs": len(records)}
        for figure in bench.figures:
            values = [record[figure] for record in records if isinstance(record.get(figure), int | float)]
            if values:
                low = min(values)
                high = max(values)
                ranges_row[figure] = str(low) if low == high else f"{low} to {high}"
        rows.append(ranges_row)
    return rows


def conditions(run: dict) -> str:
    """Returns the conditions of a run in one line."""
    commit_text = f"Commit {run['commit']}"
    if "committed_in" in run:
        commit_text += f" (committed in {run['committed_in']})"
    versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
    return f"{commit_text}; precision {run['precision']}; {run['processor']}, threads {run['threads']}; {versions}."


def table(records: list[dict]) -> str:
    """Returns a Markdown table with a row for each record, "" without records. A missing value is an empty cell."""
    columns = columns_of(records)
    return "\n".join([head(columns), *(row(record, columns) for record in records)]) if records else ""


def columns_of(records: list[dict]) -> list[str]:
    """Returns the names of all columns that any of the records has, in the order of their first occurrence."""
    return list(dict.fromkeys(name for record in records for name in record))


def head(columns: list[str]) -> str:
    """Returns the two head lines of a Markdown table."""
    titles = [name.replace("_per_second", "/s").replace("_", " ") for name in columns]
    return "| " + " | ".join(titles) + " |\n" + "|---" * len(columns) + "|"


def row(record: dict, columns: list[str]) -> str:
    """Returns a record as a line of a Markdown table. The elements of a list are separated by slashes."""
    cells = []
    for name in columns:
        value = record.get(name)
        if value is None:
            cells.append("")
        elif isinstance(value, list):
            cells.append(" / ".join(map(str, value)))
        else:
            cells.append(str(value))
    return "| " + " | ".join(cells) + " |"
