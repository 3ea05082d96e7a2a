"""Results on disk: every run of a bench, with what it ran on, in a JSON file; the same in Markdown, with ranges.

A file is of one bench on one kind of device: `{"runs": [...]}`, in the order of time. A run is one section (a kind of
work) measured at one time; none is replaced. What early runs did not record says NOT_RECORDED.
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
CONDITIONS = ("precision", "processor", "threads")  # ranges are over runs that agree in them
PACKAGES = ("torch", "transformers", "peft", "trl", "sentence-transformers")
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Bench:
    """One of the benches: the name of its files, and how its runs are held against each other."""

    name: str
    title: str
    keys: tuple[str, ...]  # columns that say what was measured; rows of two runs that agree in them are compared
    figures: tuple[str, ...]  # columns whose ranges over all runs are shown


def provenance(precision: Precision) -> dict:
    """What a measurement that starts now depends on."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(ROOT),
        "processor": processor(precision.device.type),
        "threads": torch.get_num_threads(),
        "precision": dtype_name(precision.dtype),
        "versions": {name: version(name) for name in PACKAGES},
    }


def commit(folder: Path) -> str:
    """The commit that is checked out, with +dirty if tracked files differ from it, results aside; or "not in git"."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)bench/results")
        return git("rev-parse", "HEAD") + ("+dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):  # no git here, or no checkout
        return "not in git"


def processor(device: str) -> str:
    """The name of the card or, on the CPU, of the processor."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return machine.processor()


def version(package: str) -> str:
    try:
        return torch.__version__ if package == "torch" else metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def read(path: Path) -> list[dict]:
    """The runs of a file, oldest first; none if it does not exist."""
    remedy = "Move the file away, or name another folder with --results."
    return read_record(path, remedy).items("runs") if path.exists() else []


def keep(folder: Path, device: str, bench: Bench, run: dict) -> None:
    """Adds a run, or what it has measured so far: a run of the same section and date is the same one, grown."""
    path = folder / f"{bench.name}-{device}.json"
    write_text(path.with_suffix(".md"), markdown(bench, add(path, run)))


def add(path: Path, run: dict) -> list[dict]:
    """Adds a run to a file of runs, as `keep` does, and returns all of them."""
    runs = [known for known in read(path) if (known["section"], known["date"]) != (run["section"], run["date"])]
    runs.append(run)
    write_text(path, json.dumps({"runs": runs}, indent=1) + "\n")
    return runs


def markdown(bench: Bench, runs: list[dict]) -> str:
    """Each section with the ranges over its runs, and then the runs themselves, newest first."""
    parts = [f"# {bench.title}"]
    for section in dict.fromkeys(run["section"] for run in runs):
        of_section = [run for run in runs if run["section"] == section]
        parts += [f"## {section}", f"Over all {len(of_section)} runs, none left out:", table(ranges(bench, of_section))]
        for run in reversed(of_section):
            parts += [f"### {section}, {run['date']}", conditions(run), run["note"], table(run["records"])]
    return "\n\n".join(part for part in parts if part) + "\n"


def ranges(bench: Bench, runs: list[dict]) -> list[dict]:
    """One row for what was measured under the same conditions: in how many runs, the least and the most of figures."""
    groups: dict[str, list[dict]] = {}
    for run in runs:
        for record in run["records"]:
            named = {name: record[name] for name in bench.keys if name in record}
            named |= {name: run[name] for name in CONDITIONS}
            groups.setdefault(json.dumps(named), []).append(record)
    found = []
    for named, records in groups.items():
        found.append({**json.loads(named), "runs": len(records)})
        for figure in bench.figures:
            values = [r[figure] for r in records if isinstance(r.get(figure), int | float)]
            if values:
                low, high = min(values), max(values)
                found[-1][figure] = str(low) if low == high else f"{low} to {high}"
    return found


def conditions(run: dict) -> str:
    """What a run ran on, in one line."""
    where = f"Commit {run['commit']}" + (f" (committed in {run['committed_in']})" if "committed_in" in run else "")
    versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
    return f"{where}; precision {run['precision']}; {run['processor']}, threads {run['threads']}; {versions}."


def table(records: list[dict]) -> str:
    """A Markdown table of records; those that lack a column have an empty cell."""
    columns = columns_of(records)
    return "\n".join([head(columns), *(row(record, columns) for record in records)]) if records else ""


def columns_of(records: list[dict]) -> list[str]:
    return list(dict.fromkeys(name for record in records for name in record))


def head(columns: list[str]) -> str:
    titles = [name.replace("_per_second", "/s").replace("_", " ") for name in columns]
    return "| " + " | ".join(titles) + " |\n" + "|---" * len(columns) + "|"


def row(record: dict, columns: list[str]) -> str:
    cells = ["" if record.get(name) is None else record[name] for name in columns]
    return "| " + " | ".join(" / ".join(map(str, c)) if isinstance(c, list) else str(c) for c in cells) + " |"
