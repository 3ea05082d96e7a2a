"""Measurements of the command retrieve: the recall of a retriever, and the gaps of a corpus.

Recall is the share of the gold paragraphs that a search for the text of their question finds. The gap of a question is
those of its gold paragraphs that the corpus lacks; no retriever can find them.
"""

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from r3lite.core.episode import Document, Failure, Question, folded
from r3lite.core.errors import R3LiteError
from r3lite.core.files import check_writable, sole_writer, sweep, write_json
from r3lite.retrieval.retriever import build_retriever
from r3lite.retrieval.setup import Setup

CUTS = (2, 5, 10)  # the k of recall@k


def check_output(output: Path, gap_report: str | None) -> None:
    """Raises, before anything is read, R3LiteError if an output already exists, or OSError if it cannot be written."""
    check_free(output, gap_report)
    check_writable(output if output.exists() else output.absolute().parent)
    if gap_report:
        check_writable(Path(gap_report).absolute().parent)


def check_free(output: Path, gap_report: str | None) -> None:
    """Raises R3LiteError if `output` is a file, or has a measurement or an index in it, or if `gap_report` exists."""
    if output.is_file():
        raise R3LiteError(f"--output {output} is a file", "Pass a folder.", code="output-is-file")
    for name in ("recall.json", "manifest.json"):  # an earlier measurement; an index
        if (output / name).exists():
            raise R3LiteError(f"--output {output} already has a {name}", "Pass a new folder.", code="output-exists")
    if gap_report and Path(gap_report).exists():
        raise R3LiteError(f"--gap-report {gap_report} already exists", "Pass a new file.", code="gap-report-exists")


def measure(setup: Setup, questions: list[Question], cuts: list[int], output: Path) -> None:
    """Prints the recall on `questions`, those of the setup that have gold paragraphs, and writes it to recall.json.

    Questions at which the retriever fails are left out. Raises R3LiteError if it fails at all of them.
    """
    retrieve = build_retriever(setup)
    start = time.perf_counter()
    outcomes = retrieve([(question, question.text) for question in questions])
    seconds = time.perf_counter() - start
    answered = []
    rankings = []
    for question, outcome in zip(questions, outcomes, strict=True):
        if not isinstance(outcome, Failure):
            answered.append(question)
            rankings.append(outcome)
    if not answered:
        raise R3LiteError(f"the retriever failed on every question: {outcomes[0].reason}", code="retriever-failed")
    recall = {str(k): mean_recall(answered, rankings, k) for k in cuts}
    line = f"questions  {len(answered)}"
    without_gold = len(setup.questions) - len(questions)
    if without_gold > 0:
        line += f" ({without_gold} without gold left out)"
    failures = len(questions) - len(answered)
    if failures:
        line += f" ({failures} left out because the retriever failed)"
    print(line)
    for k, value in recall.items():
        print(f"recall@{k:<3} {value:.4f}")
    print(f"{seconds:.2f} s for {len(questions)} queries, {1000 * seconds / len(questions):.1f} ms each")
    if setup.query_cache:
        print(setup.query_cache.line())
    path = output / "recall.json"
    with sole_writer(path, folder=False):
        sweep(path)
        write_json(path, {"n": len(answered), "recall": recall})
    print(f"written to {path}")


def mean_recall(questions: list[Question], rankings: list[list[Document]], k: int) -> float:
    """Returns the share of gold paragraphs among the first `k` documents of each question, averaged over questions."""
    shares = []
    for question, documents in zip(questions, rankings, strict=True):
        shares.append(len(question.gold_indices(documents[:k])) / len(question.gold))
    return sum(shares) / len(shares)


@dataclass(frozen=True)
class Gap:
    """The gold paragraphs of one question that a corpus lacks."""

    question: Question
    missing: tuple[Document, ...]

    def best_recall(self, k: int | None = None) -> float:
        """Returns the recall that a perfect retriever would have among `k` passages, or among any number."""
        present = len(self.question.gold) - len(self.missing)
        if k is not None:
            present = min(present, k)
        return present / len(self.question.gold)

    def to_json(self) -> dict:
        return {
            "id": self.question.id,
            "question": self.question.text,
            "gold": len(self.question.gold),
            "missing": [{"title": document.title, "text": document.text} for document in self.missing],
            "best_recall": self.best_recall(),
        }


def gaps(questions: Iterable[Question], documents: Iterable[Document]) -> list[Gap]:
    """Returns the gap of every question with gold paragraphs; the gap is empty if the corpus has all of them.

    The corpus has a paragraph if `Question.gold_index` recognizes a passage as this paragraph, as recall does.
    """
    by_title = defaultdict(list)
    for document in documents:
        by_title[folded(document.title)].append(document)
    question_gaps = []
    for question in questions:
        if question.gold:
            candidates: list[Document] = []
            for gold in question.gold:
                candidates += by_title[folded(gold.title)]
            present = question.gold_indices(candidates)
            missing = tuple(gold for i, gold in enumerate(question.gold) if i not in present)
            question_gaps.append(Gap(question, missing))
    return question_gaps


def report(question_gaps: list[Gap], cuts: Iterable[int]) -> dict:
    """Returns the content of --gap-report: counts, the best mean recall at each cut, and the questions with gaps."""
    return {
        "n": len(question_gaps),
        "gold": sum(len(gap.question.gold) for gap in question_gaps),
        "missing": sum(len(gap.missing) for gap in question_gaps),
        "best_recall": _mean_best_recall(question_gaps, None),
        "best_recall_at": {str(k): _mean_best_recall(question_gaps, k) for k in cuts},
        "questions": [gap.to_json() for gap in question_gaps if gap.missing],
    }


def _mean_best_recall(question_gaps: list[Gap], k: int | None) -> float:
    return sum(gap.best_recall(k) for gap in question_gaps) / len(question_gaps)


def write_gaps(
    documents: Iterable[Document],
    questions: list[Question],
    cuts: list[int],
    path: Path,
) -> None:
    """Writes which gold paragraphs the corpus lacks to the file `path`, as JSON, and prints how many these are."""
    gap_report = report(gaps(questions, documents), cuts)
    missing = f"{gap_report['missing']} of {gap_report['gold']} gold paragraphs"
    print(f"the corpus lacks {missing}, in {len(gap_report['questions'])} of {gap_report['n']} questions")
    best = ", ".join(f"{value:.4f} at {k}" for k, value in gap_report["best_recall_at"].items())
    print(f"the best possible recall is {gap_report['best_recall']:.4f}: {best}")
    write_json(path, gap_report)
    print(f"written to {path}")
