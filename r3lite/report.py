"""Writes one self-contained HTML page about a run, or about several side by side."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from r3lite.core import command
from r3lite.core.errors import R3LiteError
from r3lite.core.files import read_jsonl, sole_writer, sweep, write_text
from r3lite.reports import png
from r3lite.reports.data import DataFile, of_questions, read_data
from r3lite.reports.page import Report, html
from r3lite.reports.run import Run, read_runs
from r3lite.settings import CommandConfig, ReportSettings

PAGE = "report.html"
EVERY = 10  # seconds between two looks at a run that goes on


class ReportConfig(CommandConfig):
    """Writes an HTML page about a run: python -m r3lite.report runs/ppo

    The page shows training curves, evaluation scores with intervals and errors, and episodes with their documents and
    rewards, in one file without scripts or network access. Several run folders are shown side by side; a folder that
    contains runs, such as quickstart's, stands for all of them; for a file of trajectories or questions, the page shows
    lengths. It is written to --output, by default report.html in the first folder.
    """

    report: ReportSettings = ReportSettings()


def report(config: ReportConfig) -> None:
    settings = config.report
    if settings.png:
        png.check()  # before anything is written
    first = Path(settings.runs[0])
    path = Path(config.common.output or (first if first.is_dir() else first.parent) / PAGE)
    while True:
        found = read(settings)
        going_on = settings.watch and not all(run.complete for run in found.runs)
        page = html(found, time.strftime("written on %Y-%m-%d at %H:%M:%S"), EVERY if going_on else None)
        with sole_writer(path, folder=False):
            sweep(path)
            write_text(path, page)
        names = ", ".join(f"{x.name} ({x.label})" for x in (*found.runs, *found.data))
        print(f"{path}  {len(page.encode()) / 1024:,.0f} KiB: {names}", flush=True)
        if not going_on:
            break
        time.sleep(EVERY)
    if settings.png:
        charts = [chart for some in found.charts.values() for chart in some]
        png.write(charts, Path(settings.png))
        print(f"{settings.png}  {len(charts)} charts")


def read(settings: ReportSettings) -> Report:
    """Everything that the paths of --runs name."""
    files = [Path(name) for name in settings.runs if Path(name).is_file()]
    folders = [name for name in settings.runs if Path(name) not in files]
    length, unit = (lambda text: len(text.split())), "words"
    if files and settings.model:
        from r3lite.models.weights import resolve_folder
        from r3lite.protocols.tokenizer import Tokenizer

        tokenizer = Tokenizer.load(resolve_folder(settings.model))
        length, unit = (lambda text: len(tokenizer.encode(text))), "tokens"
    runs = read_runs(folders)
    return Report(runs, [read_file(file, length, unit) for file in files], differences(runs))


def read_file(path: Path, length: Callable[[str], int], unit: str) -> DataFile:
    """What there is in a file of trajectories, or else of questions of any supported format."""
    from r3lite.datasets.qa import read_questions

    first = next(read_jsonl(path, on_bad=lambda bad: None), None)
    if first is not None and "steps" in first:
        return read_data(path, length, unit)
    return of_questions(path.name, read_questions(path), length, unit)


def differences(runs: Sequence[Run]) -> dict[str, tuple[str, dict]]:
    """Of each evaluation, by name, how it compares with the first one that answered the same questions."""
    from r3lite.evaluation.comparisons import compare
    from r3lite.evaluation.folder import paired_marks, predictions_of

    found: dict[str, tuple[str, dict]] = {}
    firsts: dict[frozenset[tuple[str, str]], tuple[Run, dict]] = {}
    for run in runs:
        predictions = predictions_of(run.predictions)
        if not predictions:
            continue
        questions = frozenset((id, question) for id, (question, _) in predictions.items())
        first, theirs = firsts.setdefault(questions, (run, predictions))
        if first is run:
            continue
        try:
            found[run.name] = first.name, compare(*paired_marks(theirs, predictions))
        except R3LiteError as error:  # as when the retriever failed throughout
            run.notes.append(error.cause)
    return found


main = command.Command("report", ReportConfig(), report).entry(__name__)
