"""Writes one self-contained HTML page about a run, or about several side by side."""

import codecs
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from r3lite.core import command
from r3lite.core.errors import R3LiteError
from r3lite.core.files import MEND_LINE, open_regular, read_jsonl, sole_writer, sweep, write_text
from r3lite.reports import png
from r3lite.reports.data import DataFile, of_questions, read_data
from r3lite.reports.page import Report, html
from r3lite.reports.run import Run, names, read_runs
from r3lite.settings import CommandConfig, ReportSettings

PAGE = "report.html"
PERIOD = 10  # seconds after which --watch reads the runs again


class ReportConfig(CommandConfig):
    """Writes an HTML page about a run: python -m r3lite.report runs/ppo

    The page shows training curves, evaluation scores with intervals and errors, and episodes with their documents and
    rewards, in one file without scripts or network access. Several run folders are shown side by side; a folder that
    contains runs, such as quickstart's, stands for all of them; for a file of trajectories or questions, the page shows
    lengths. It is written to --output, by default report.html in the first folder.
    """

    report: ReportSettings = ReportSettings()


def report(config: ReportConfig) -> None:
    """Writes the page, with --watch until all runs are complete, and with --png the charts."""
    settings = config.report
    if settings.png:
        png.check()  # before anything is written
    first = Path(settings.runs[0])
    folder = first if first.is_dir() else first.parent
    path = Path(config.common.output or folder / PAGE)
    while True:
        data = read(settings, config.common.seed)
        watching = settings.watch and not all(run.complete for run in data.runs)
        reload_seconds = PERIOD if watching else None  # after which a browser reloads the page
        page = html(data, time.strftime("written on %Y-%m-%d at %H:%M:%S"), reload_seconds)
        with sole_writer(path, folder=False):
            sweep(path)
            write_text(path, page)
        sources = ", ".join(f"{source.name} ({source.label})" for source in (*data.runs, *data.data))
        print(f"{path}  {len(page.encode()) / 1024:,.0f} KiB: {sources}", flush=True)
        if not watching:
            break
        time.sleep(PERIOD)
    if settings.png:
        charts = list(itertools.chain.from_iterable(data.charts.values()))
        png.write(charts, Path(settings.png))
        print(f"{settings.png}  {len(charts)} charts")


def read(settings: ReportSettings, seed: int) -> Report:
    """Returns what the page shows: the runs, evaluations and data files that --runs names.

    `seed` is that of the bootstrap by which evaluations are compared.
    """
    files = [Path(name) for name in settings.runs if Path(name).is_file()]
    folders = [name for name in settings.runs if Path(name) not in files]
    length: Callable[[str], int] = count_words
    unit = "words"
    if files and settings.model:
        from r3lite.models.weights import resolve_folder
        from r3lite.protocols.tokenizer import Tokenizer

        tokenizer = Tokenizer.load(resolve_folder(settings.model))
        length = lambda text: len(tokenizer.encode(text))  # noqa: E731
        unit = "tokens"
    runs = read_runs(folders)
    # Two files may have the same name in different folders, but the charts need different names: `names` makes them.
    data_files = []
    for file, name in zip(files, names(files), strict=True):
        data_files.append(replace(read_file(file, length, unit), name=name))
    return Report(runs, data_files, differences(runs, seed))


def count_words(text: str) -> int:
    return len(text.split())


def read_file(path: Path, length: Callable[[str], int], unit: str) -> DataFile:
    """Returns the contents of a file: of trajectories if its first row has steps, else of questions."""
    from r3lite.datasets.qa import read_questions

    with open_regular(path, MEND_LINE) as file:
        head = file.read(64).lstrip(codecs.BOM_UTF8 + b" \t\r\n")
    first = None
    if head.startswith(b"{"):  # JSON lines; an array might be one line of any length
        first = next(read_jsonl(path, on_bad=lambda bad: None), None)
    if first is not None and "steps" in first:
        return read_data(path, length, unit)
    questions = read_questions(path)
    return of_questions(path.name, questions, length, unit)


def differences(runs: Sequence[Run], seed: int) -> dict[str, tuple[str, dict]]:
    """Compares each evaluation with the first evaluation of the same questions.

    Returns, by the name of each evaluation, the name of that first one and the comparison with it. If they cannot be
    compared, appends the reason to the notes of the run.
    """
    from r3lite.evaluation.comparisons import compare
    from r3lite.evaluation.folder import paired_marks, predictions_of

    comparisons: dict[str, tuple[str, dict]] = {}
    # By the questions of an evaluation, as pairs (id, text): the first evaluation of them, and its predictions.
    firsts: dict[frozenset[tuple[str, str]], tuple[Run, dict]] = {}
    for run in runs:
        predictions = predictions_of(run.predictions)
        if not predictions:
            continue
        questions = frozenset((id, question) for id, (question, _) in predictions.items())
        first, predictions_of_first = firsts.setdefault(questions, (run, predictions))
        if first is run:
            continue
        try:
            comparison = compare(*paired_marks(predictions_of_first, predictions), seed)
        except R3LiteError as error:  # for example, the retriever failed for all questions
            run.notes.append(error.cause)
        else:
            comparisons[run.name] = (first.name, comparison)
    return comparisons


main = command.Command("report", ReportConfig(), work=report)

if __name__ == "__main__":
    raise SystemExit(main())
