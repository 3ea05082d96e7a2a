"""What the command retrieve measures: the recall of a retriever, which is the share of the gold paragraphs that the
texts of questions find; and the gaps of a corpus, gold paragraphs that it lacks, so that no retriever can find them."""

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

CUTS = (2, 5, 10)


def check_output(output: Path, gap_report: str | None) -> None:
    """Refuses, before anything is read, an output that already exists or cannot be written."""
    if output.is_file():
        raise R3LiteError(f"--output {output} is a file", "Pass a folder.")
    for taken in ("recall.json", "manifest.json"):  # an earlier measurement; an index
        if (output / taken).exists():
            raise R3LiteError(f"--output {output} already has a {taken}", "Pass a new folder.")
    if gap_report:
        if Path(gap_report).exists():
            raise R3LiteError(f"--gap-report {gap_report} already exists", "Pass a new file.")
        check_writable(Path(gap_report).absolute().parent)


def measure(setup: Setup, known: list[Question], cuts: list[int], output: Path) -> None:
    """Prints the recall of the `known` questions, which have gold paragraphs, and writes it to recall.json."""
    search = build_retriever(setup)
    start = time.perf_counter()
    outcomes = search([(q, q.text) for q in known])
    seconds = time.perf_counter() - start
    answered = [(q, found) for q, found in zip(known, outcomes, strict=True) if not isinstance(found, Failure)]
    if not answered:
        raise R3LiteError(f"the retriever failed on every question: {outcomes[0].reason}")
    bare = f" ({len(setup.questions) - len(known)} without gold left out)" if len(setup.questions) > len(known) else ""
    failed = f" ({len(known) - len(answered)} left out because the retriever failed)"
    asked, found = zip(*answered, strict=True)
    recall = {str(k): mean_recall(asked, found, k) for k in cuts}
    print(f"questions  {len(answered)}{bare}{failed if len(answered) < len(known) else ''}")
    for k, value in recall.items():
        print(f"recall@{k:<3} {value:.4f}")
    print(f"{seconds:.2f} s for {len(known)} queries, {1000 * seconds / len(known):.1f} ms each")
    if setup.query_cache:
        print(setup.query_cache.line())
    path = output / "recall.json"
    with sole_writer(path, folder=False):
        sweep(path)
        write_json(path, {"n": len(answered), "recall": recall})
    print(f"written to {path}")


def mean_recall(questions: list[Question], found: list[list[Document]], k: int) -> float:
    """Share of gold paragraphs among the first `k` documents of each question, averaged over questions."""
    shares = [len(q.gold_found(documents[:k])) / len(q.gold) for q, documents in zip(questions, found, strict=True)]
    return sum(shares) / len(shares)


@dataclass(frozen=True)
class Gap:
    """The gold paragraphs of one question that a corpus lacks."""

    question: Question
    missing: tuple[Document, ...]

    def best_recall(self, k: int | None = None) -> float:
        """The recall that a perfect retriever would have among `k` passages, or among any number."""
        there = len(self.question.gold) - len(self.missing)
        return (there if k is None else min(there, k)) / len(self.question.gold)

    def to_json(self) -> dict:
        asked = {"id": self.question.id, "question": self.question.text, "gold": len(self.question.gold)}
        missing = [{"title": d.title, "text": d.text} for d in self.missing]
        return asked | {"missing": missing, "best_recall": self.best_recall()}


def gaps(questions: Iterable[Question], documents: Iterable[Document]) -> list[Gap]:
    """The gap of every question with gold paragraphs, whether it lacks any or none. A paragraph is there if a passage
    is recognised as it as a retrieved one would be, by `Question.gold_index`."""
    by_title, found = defaultdict(list), []
    for document in documents:
        by_title[folded(document.title)].append(document)
    for question in (question for question in questions if question.gold):
        there = question.gold_found(d for gold in question.gold for d in by_title[folded(gold.title)])
        found.append(Gap(question, tuple(d for i, d in enumerate(question.gold) if i not in there)))
    return found


def report(found: list[Gap], cuts: Iterable[int]) -> dict:
    """What `retrieve --gap-report` writes: counts, the best mean recall at each cut, and the questions with gaps."""
    best = {k: sum(gap.best_recall(k) for gap in found) / len(found) for k in (None, *cuts)}
    counts = {"n": len(found), "gold": sum(len(gap.question.gold) for gap in found)}
    counts |= {"missing": sum(len(gap.missing) for gap in found), "best_recall": best.pop(None)}
    lacking = [gap.to_json() for gap in found if gap.missing]
    return counts | {"best_recall_at": {str(k): value for k, value in best.items()}, "questions": lacking}


def write_gaps(documents: Iterable[Document], known: list[Question], cuts: list[int], path: Path) -> None:
    """Writes and prints which gold paragraphs the corpus lacks."""
    found = report(gaps(known, documents), cuts)
    best = ", ".join(f"{value:.4f} at {k}" for k, value in found["best_recall_at"].items())
    lacking = f"{found['missing']} of {found['gold']} gold paragraphs of {len(found['questions'])} questions"
    print(f"the corpus lacks {lacking}")
    print(f"the best possible recall is {found['best_recall']:.4f}: {best}")
    write_json(path, found)
    print(f"written to {path}")
