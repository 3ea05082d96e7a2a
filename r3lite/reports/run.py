"""What a report knows of a folder: the metrics, episodes, scores and predictions of a run, as far as they are there.

A run may be going on, have been killed, or have learned nothing: what can be read is shown, and the rest is noted.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from r3lite.core import run_files
from r3lite.core.errors import R3LiteError
from r3lite.core.files import load_toml, read_jsonl, read_record, similar_path
from r3lite.core.records import InvalidRecord, Record
from r3lite.settings.commands import with_baseline

# A folder with one of these files, or with the file of settings, is a run's.
RESULT_FILES = (run_files.METRICS, run_files.SCORES, run_files.PREDICTIONS)
REMEDY = "Pass a run folder, an evaluation folder, or a folder that contains some."
MAX_EPISODES = 32  # of a round: the page shows at most so many of the first round, and of the newest


@dataclass
class Run:
    """What a run's folder holds. What is not there is empty; `notes` say what could not be read."""

    name: str
    folder: Path
    command: str = ""
    settings: dict = field(default_factory=dict)
    metrics: list[dict] = field(default_factory=list)
    summary: dict = field(default_factory=dict)
    scores: dict = field(default_factory=dict)
    predictions: list[Record] = field(default_factory=list)
    episodes: dict[int, list[Record]] = field(default_factory=dict)  # by round: only the first one and the newest
    faults: dict[int, Counter] = field(default_factory=dict)  # by round: how many steps have each fault
    steps: dict[int, int] = field(default_factory=dict)  # by round: how many steps there are
    notes: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether the run has come to its end."""
        return bool(self.summary or self.scores)

    @property
    def label(self) -> str:
        """Its command, and how far it is."""
        if self.scores:
            return f"{self.command or 'evaluate'}, {self.scores.get('n', '?')} questions"
        steps = max((row["step"] for row in self.metrics), default=0)
        label = f"{self.command or 'unknown command'}, {steps} steps"
        if not self.complete:
            label += ", not complete"
        return label


def read_runs(paths: Sequence[str]) -> list[Run]:
    """Returns the runs in folders; a folder that is no run's, such as quickstart's, stands for the run folders in it.

    Raises R3LiteError for a path that holds no run.
    """
    folders: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            raise R3LiteError(f"{path} is not a folder{similar_path(path)}", REMEDY, code="not-a-folder")
        run_folders = [path]
        if not is_run(path):
            run_folders = sorted(filter(is_run, path.iterdir()), key=start_of)
        if not run_folders:
            raise R3LiteError(f"{path} has no run: none of {', '.join(RESULT_FILES)}", REMEDY, code="no-run")
        folders += run_folders
    # Each folder once, even if it is named by several paths.
    folders = list({folder.resolve(): folder for folder in folders}.values())
    return [read_run(folder, name) for folder, name in zip(folders, names(folders), strict=True)]


def is_run(folder: Path) -> bool:
    """Returns whether a folder is a run's."""
    return any((folder / name).is_file() for name in (*RESULT_FILES, run_files.CONFIG))


def start_of(folder: Path) -> tuple[float, str]:
    """Returns a sort key: when the file of settings was changed, or without one the folder; then the folder's name.

    A run writes the file of settings first.
    """
    dated = folder / run_files.CONFIG
    if not dated.exists():
        dated = folder
    return dated.stat().st_mtime, folder.name


def names(folders: list[Path]) -> list[str]:
    """Returns a name for each folder: the last parts of its path, as few as make all names different."""
    resolved = [folder.resolve() for folder in folders]
    depth = max((len(folder.parts) for folder in resolved), default=0)
    for count in range(1, depth + 1):
        ends = ["/".join(folder.parts[-count:]) for folder in resolved]
        if len(set(ends)) == len(ends):
            return ends
    return [str(folder) for folder in resolved]


def read_run(folder: Path, name: str) -> Run:
    """Reads what there is of a run."""
    run = Run(name, folder)
    if (folder / run_files.CONFIG).exists():
        config = load_toml(folder / run_files.CONFIG)
        tables = [(key, value) for key, value in config.items() if isinstance(value, dict)]
        if tables:
            run.command, run.settings = tables[0]
        run.name = with_baseline(name, run.settings)
    for key, file in (("summary", run_files.SUMMARY), ("scores", run_files.SCORES)):
        if (folder / file).exists():
            setattr(run, key, read_record(folder / file, "Delete or restore the file.").values)
    rows_by_step = {}
    for row in lines(run, run_files.METRICS):
        if isinstance(row.values.get("step"), int):
            rows_by_step[row.values["step"]] = row.values
    run.metrics = [rows_by_step[step] for step in sorted(rows_by_step)]
    run.predictions = list(lines(run, run_files.PREDICTIONS))
    for row in lines(run, run_files.EPISODES):
        _add_episode(run, row)
    return run


def lines(run: Run, file: str) -> Iterator[Record]:
    """Yields the lines of a file of the run; none if the file is not there.

    A line that cannot be read, such as the last one of a run that was killed or is still writing, is left out. It is
    mentioned in the run's notes.
    """
    if not (run.folder / file).exists():
        return
    bad: list[InvalidRecord] = []
    yield from read_jsonl(run.folder / file, on_bad=bad.append)
    if bad:
        run.notes.append(f"{len(bad)} lines of {file} could not be read, such as: {bad[0].cause}")


def _add_episode(run: Run, row: Record) -> None:
    """Counts the steps and faults of an episode; adds it to `run.episodes`, which has the first and the newest round.

    The rows must come in the order of their rounds.
    """
    number = row.whole("step", 0)
    steps = row.records("steps", ())
    faults = run.faults.setdefault(number, Counter())
    for step in steps:
        faults.update(step.texts("faults", ()))
    run.steps[number] = run.steps.get(number, 0) + len(steps)
    if number not in run.episodes and len(run.episodes) > 1:
        run.episodes.popitem()  # a round that was the newest until now
    episodes = run.episodes.setdefault(number, [])
    if len(episodes) < MAX_EPISODES:
        episodes.append(row)
