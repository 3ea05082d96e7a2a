"""What a report knows of a folder: the metrics, episodes, scores and predictions of a run, as far as they are there.

A run may be going on, have been killed, or have learned nothing: what can be read is shown, and the rest is noted.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from r3lite.core.errors import R3LiteError
from r3lite.core.files import read_jsonl, read_record
from r3lite.core.invocation import load_toml
from r3lite.core.records import InvalidRecord, Record
from r3lite.settings.commands import with_baseline

METRICS, EPISODES, PREDICTIONS = "metrics.jsonl", "episodes.jsonl", "predictions.jsonl"
SCORES, SUMMARY, CONFIG = "scores.json", "summary.json", "config.toml"
TRACES = (METRICS, SCORES, PREDICTIONS)  # a folder with one of them is a run's
REMEDY = "Pass a run folder, an evaluation folder, or a folder that contains some."
KEPT = 32  # episodes that are shown of the first round, and of the last


@dataclass
class Run:
    """A run's folder. What is not there is empty; `notes` say what could not be read."""

    name: str
    folder: Path
    command: str = ""
    settings: dict = field(default_factory=dict)
    metrics: list[dict] = field(default_factory=list)
    summary: dict = field(default_factory=dict)
    scores: dict = field(default_factory=dict)
    predictions: list[Record] = field(default_factory=list)
    shown: dict[int, list[Record]] = field(default_factory=dict)  # episodes of the first round, and of the newest
    faults: dict[int, Counter] = field(default_factory=dict)  # by round: how many steps have each fault
    steps: dict[int, int] = field(default_factory=dict)  # by round: how many steps there are
    notes: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return bool(self.summary or self.scores)

    @property
    def label(self) -> str:
        """Its command, and how far it is."""
        if self.scores:
            return f"{self.command or 'evaluate'}, {self.scores.get('n', '?')} questions"
        steps = max((row["step"] for row in self.metrics), default=0)
        return f"{self.command or 'unknown command'}, {steps} steps" + ("" if self.complete else ", not complete")


def read_runs(paths: Sequence[str]) -> list[Run]:
    """The runs of folders, and of the folders in those that are no run's themselves, such as quickstart's.

    Raises R3LiteError for a path that holds none.
    """
    folders: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            raise R3LiteError(f"{path} is not a folder", REMEDY, code="not-a-folder")
        found = [path] if is_run(path) else sorted(filter(is_run, path.iterdir()), key=began)
        if not found:
            raise R3LiteError(f"{path} has no run: none of {', '.join(TRACES)}", REMEDY, code="no-run")
        folders += found
    folders = list(dict.fromkeys(folders))
    return [read_run(folder, name) for folder, name in zip(folders, names(folders), strict=True)]


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (*TRACES, CONFIG))


def began(folder: Path) -> tuple[float, str]:
    """When a run began, by the settings that are written first; and the name."""
    config = folder / CONFIG
    return (config if config.exists() else folder).stat().st_mtime, folder.name


def names(folders: list[Path]) -> list[str]:
    """The shortest ends of the paths that differ from each other."""
    resolved = [folder.resolve() for folder in folders]
    for parts in range(1, max((len(folder.parts) for folder in resolved), default=0) + 1):
        found = ["/".join(folder.parts[-parts:]) for folder in resolved]
        if len(set(found)) == len(found):
            return found
    return [str(folder) for folder in resolved]


def read_run(folder: Path, name: str) -> Run:
    run = Run(name, folder)
    if (folder / CONFIG).exists():
        tables = {key: value for key, value in load_toml(folder / CONFIG).items() if isinstance(value, dict)}
        run.command, run.settings = next(iter(tables.items()), ("", {}))
        run.name = with_baseline(name, run.settings)
    for key, file in (("summary", SUMMARY), ("scores", SCORES)):
        if (folder / file).exists():
            setattr(run, key, read_record(folder / file, "Delete or restore the file.").values)
    of_step = {row.values["step"]: row.values for row in lines(run, METRICS) if isinstance(row.values.get("step"), int)}
    run.metrics = [of_step[step] for step in sorted(of_step)]
    run.predictions = list(lines(run, PREDICTIONS))
    for row in lines(run, EPISODES):
        _take(run, row)
    return run


def lines(run: Run, file: str) -> Iterator[Record]:
    """The lines of a file of the run, none if it is not there. One that cannot be read, as the last one of a run that
    was killed or is just writing, is left out, and that is noted."""
    if not (run.folder / file).exists():
        return
    bad: list[InvalidRecord] = []
    yield from read_jsonl(run.folder / file, on_bad=bad.append)
    if bad:
        run.notes.append(f"{len(bad)} lines of {file} could not be read, such as: {bad[0].cause}")


def _take(run: Run, row: Record) -> None:
    """Counts an episode's faults, and keeps it if it is of the first round or the newest."""
    number, steps = row.whole("step", 0), row.records("steps", ())
    run.faults.setdefault(number, Counter()).update(fault for step in steps for fault in step.texts("faults", ()))
    run.steps[number] = run.steps.get(number, 0) + len(steps)
    if number not in run.shown and len(run.shown) > 1:
        run.shown.popitem()  # no longer the newest
    shown = run.shown.setdefault(number, [])
    if len(shown) < KEPT:
        shown.append(row)
