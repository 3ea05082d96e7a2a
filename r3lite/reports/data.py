"""Files of SFT rows and questions: how long their parts are, as histograms."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from r3lite.core.episode import Question, Step
from r3lite.core.errors import R3LiteError
from r3lite.core.files import read_jsonl
from r3lite.core.records import Record
from r3lite.reports.chart import Bar, Bars, Chart, number, ticks

PARTS = {
    "question": "Questions",
    "analyses": "Analyses of a row",
    "documents": "Documents of a row",
    "answer": "Answers",
    "steps": "Steps of a row",
    "paragraphs": "Paragraphs of a question",
    "gold": "Gold paragraphs of a question",
}
COUNTED = ("steps", "paragraphs", "gold")
BINS = 10


@dataclass
class DataFile:
    """The lengths of each part, row by row, in `unit`; COUNTED parts are counted."""

    name: str
    unit: str
    rows: int = 0
    lengths: dict[str, list[int]] = field(default_factory=dict)
    what: str = "rows"

    @property
    def label(self) -> str:
        return f"data, {self.rows} {self.what}"

    def add(self, sizes: dict[str, int]) -> None:
        """Takes in a row."""
        self.rows += 1
        for part, size in sizes.items():
            self.lengths.setdefault(part, []).append(size)


def read_data(path: Path, length: Callable[[str], int], unit: str) -> DataFile:
    """The lengths of a file of trajectories, as `collect` writes them, by `length` of a text, in `unit`.

    Raises R3LiteError if no line has a question.
    """
    found = DataFile(path.name, unit)
    for row in read_jsonl(path):
        if "question" in row:
            found.add(_sizes(row, length))
    if not found.rows:
        raise R3LiteError(f"{path} holds no rows with a question", "Name a file that r3lite.collect wrote.")
    return found


def of_questions(name: str, questions: Iterable[Question], length: Callable[[str], int], unit: str) -> DataFile:
    """The same of questions as a data set has them."""
    found = DataFile(name, unit, what="questions")
    for question in questions:
        sizes = {"question": length(question.text), "answer": length(next(iter(question.answers), ""))}
        if question.documents:
            sizes |= {"paragraphs": len(question.documents), "gold": len(question.gold)}
            sizes["documents"] = sum(length(document.text) for document in question.documents)
        found.add(sizes)
    return found


def _sizes(row: Record, length: Callable[[str], int]) -> dict[str, int]:
    steps = [Step.from_json(step) for step in row.records("steps", ())]
    answer = next((step.answer for step in reversed(steps) if step.answer is not None), None)
    sizes = {"question": length(row.text("question"))}
    if steps:
        sizes["analyses"] = sum(length(step.analysis) for step in steps)
        sizes["documents"] = sum(length(document.text) for step in steps for document in step.documents)
        sizes["steps"] = len(steps)
    if answer is None:
        answer = next(iter(row.texts("answers", ())), None)
    return sizes | ({} if answer is None else {"answer": length(answer)})


def charts(files: Sequence[DataFile]) -> dict[str, list[Chart]]:
    """Histograms of each part, the files side by side."""
    made = []
    for part, title in PARTS.items():
        sizes = {file.name: file.lengths.get(part, []) for file in files}
        if any(sizes.values()):
            made.append(_histogram(part, title, sizes, files[0].unit))
    return {"Data": made}


def _histogram(part: str, title: str, sizes: dict[str, list[int]], unit: str) -> Bars:
    """Rows by size, in bins of equal round width."""
    everything = [size for some in sizes.values() for size in some]
    low, high = min(everything), max(everything)
    step = max(1, round(ticks(0, max(1, high - low), BINS)[1]))
    first = low // step * step
    edges = range(first, high + 1, step)
    counts = {
        name: [Bar(sum(edge <= size < edge + step for size in some)) for edge in edges] for name, some in sizes.items()
    }
    groups = [number(edge) if step == 1 else f"{number(edge)}+" for edge in edges]
    what = "rows" if part in COUNTED else f"rows, by {unit}"
    return Bars(f"data-{part}", title, what, groups, counts)
