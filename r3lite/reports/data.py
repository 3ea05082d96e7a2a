"""Files of SFT rows and questions: how long their parts are, as histograms."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
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
COUNTED = ("steps", "paragraphs", "gold")  # parts whose size is their number, not their length
BINS = 10


@dataclass(frozen=True)
class DataFile:
    """The sizes of the parts of each row of a file, by the keys of PARTS.

    The size of a part in COUNTED is a number of things; the size of any other part is a length in `unit`.
    """

    name: str
    unit: str
    sizes: list[dict[str, int]]
    noun: str = "rows"

    @property
    def label(self) -> str:
        """The kind and the size of the file, in words."""
        return f"data, {len(self.sizes)} {self.noun}"

    def of(self, part: str) -> list[int]:
        """Returns the sizes of a part in the rows that have it."""
        return [sizes[part] for sizes in self.sizes if part in sizes]


def read_data(path: Path, length: Callable[[str], int], unit: str) -> DataFile:
    """Returns the sizes of the rows of a file of trajectories, as `collect` writes it.

    `length` returns the length of a text in `unit`. Raises R3LiteError if no line has a question.
    """
    sizes = [_of_row(row, length) for row in read_jsonl(path) if "question" in row]
    if not sizes:
        raise R3LiteError(
            f"{path} has no rows with a question",
            "Pass a file written by r3lite.collect.",
            code="no-rows-with-question",
        )
    return DataFile(path.name, unit, sizes)


def of_questions(
    name: str,
    questions: Iterable[Question],
    length: Callable[[str], int],
    unit: str,
) -> DataFile:
    """Returns the sizes of questions as a data set has them. `length` returns the length of a text in `unit`."""
    sizes = [_of_question(question, length) for question in questions]
    return DataFile(name, unit, sizes, "questions")


def _of_question(question: Question, length: Callable[[str], int]) -> dict[str, int]:
    answer = next(iter(question.answers), "")
    sizes = {"question": length(question.text), "answer": length(answer)}
    if question.documents:
        sizes["paragraphs"] = len(question.documents)
        sizes["gold"] = len(question.gold)
        sizes["documents"] = sum(length(document.text) for document in question.documents)
    return sizes


def _of_row(row: Record, length: Callable[[str], int]) -> dict[str, int]:
    steps = [Step.from_json(step) for step in row.records("steps", ())]
    answers = [step.answer for step in reversed(steps) if step.answer is not None]
    if not answers:
        answers = row.texts("answers", ())
    sizes = {"question": length(row.text("question"))}
    if answers:
        sizes["answer"] = length(answers[0])
    if steps:
        sizes["analyses"] = sum(length(step.analysis) for step in steps)
        documents = chain.from_iterable(step.documents for step in steps)
        sizes["documents"] = sum(length(document.text) for document in documents)
        sizes["steps"] = len(steps)
    return sizes


def charts(files: Sequence[DataFile]) -> dict[str, list[Chart]]:
    """Returns histograms of each part, the files side by side."""
    histograms: list[Chart] = []
    for part, title in PARTS.items():
        sizes = {file.name: file.of(part) for file in files}
        if any(sizes.values()):
            histograms.append(_histogram(part, title, sizes, files[0].unit))
    return {"Data": histograms}


def _histogram(part: str, title: str, sizes: dict[str, list[int]], unit: str) -> Bars:
    """Returns the numbers of rows by the size of a part, in bins of equal round width; `sizes` are by file."""
    all_sizes = list(chain.from_iterable(sizes.values()))
    low = min(all_sizes)
    high = max(all_sizes)
    _, round_width, *_ = ticks(0, max(1, high - low), BINS)  # the first tick is 0
    width = max(1, round(round_width))
    first_edge = low // width * width
    edges = range(first_edge, high + 1, width)
    bars = {}
    for name, sizes_of_file in sizes.items():
        bars[name] = [Bar(_count(sizes_of_file, edge, width)) for edge in edges]
    groups = [number(edge) for edge in edges]
    if width > 1:
        groups = [f"{group}+" for group in groups]
    unit_of_rows = f"rows, by {unit}"
    if part in COUNTED:
        unit_of_rows = "rows"
    return Bars(
        name=f"data-{part}",
        title=title,
        unit=unit_of_rows,
        groups=groups,
        series=bars,
    )


def _count(sizes: Sequence[int], edge: int, width: int) -> int:
    """Returns how many sizes are in the bin from `edge` to `edge` + `width` - 1."""
    return sum(edge <= size < edge + width for size in sizes)
