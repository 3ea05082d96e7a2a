"""Files of SFT rows and questions: how long their parts are, as histograms."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class DataFile:
    """The sizes of the parts of each row: lengths in `unit`, and of COUNTED parts how many there are."""

    name: str
    unit: str
    sizes: list[dict[str, int]]
    what: str = "rows"

    @property
    def label(self) -> str:
        return f"data, {len(self.sizes)} {self.what}"

    def of(self, part: str) -> list[int]:
        """The sizes of a part, of the rows that have it."""
        return [sizes[part] for sizes in self.sizes if part in sizes]


def read_data(path: Path, length: Callable[[str], int], unit: str) -> DataFile:
    """The lengths of a file of trajectories, as `collect` writes them, by `length` of a text, in `unit`.

    Raises R3LiteError if no line has a question.
    """
    sizes = [_of_row(row, length) for row in read_jsonl(path) if "question" in row]
    if not sizes:
        raise R3LiteError(
            f"{path} has no rows with a question",
            "Pass a file written by r3lite.collect.",
            code="no-rows-with-question",
        )
    return DataFile(path.name, unit, sizes)


def of_questions(name: str, questions: Iterable[Question], length: Callable[[str], int], unit: str) -> DataFile:
    """The same of questions as a data set has them."""
    return DataFile(name, unit, [_of_question(question, length) for question in questions], "questions")


def _of_question(question: Question, length: Callable[[str], int]) -> dict[str, int]:
    sizes = {"question": length(question.text), "answer": length(next(iter(question.answers), ""))}
    if question.documents:
        sizes |= {"paragraphs": len(question.documents), "gold": len(question.gold)}
        sizes["documents"] = sum(length(document.text) for document in question.documents)
    return sizes


def _of_row(row: Record, length: Callable[[str], int]) -> dict[str, int]:
    steps = [Step.from_json(step) for step in row.records("steps", ())]
    answers = [step.answer for step in reversed(steps) if step.answer is not None] or row.texts("answers", ())
    sizes = {"question": length(row.text("question"))}
    if answers:
        sizes["answer"] = length(answers[0])
    if steps:
        sizes["analyses"] = sum(length(step.analysis) for step in steps)
        sizes["documents"] = sum(length(document.text) for step in steps for document in step.documents)
        sizes["steps"] = len(steps)
    return sizes


def charts(files: Sequence[DataFile]) -> dict[str, list[Chart]]:
    """Histograms of each part, the files side by side."""
    made = []
    for part, title in PARTS.items():
        sizes = {file.name: file.of(part) for file in files}
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
