"""Gaps of a corpus: gold paragraphs that it lacks, so that no retriever can bring them."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from r3lite.core.episode import Document, Question, folded
from r3lite.core.files import write_json


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
    by_title = defaultdict(list)
    for document in documents:
        by_title[folded(document.title)].append(document)
    found = []
    for question in questions:
        there = question.gold_found(d for gold in question.gold for d in by_title[folded(gold.title)])
        if question.gold:
            found.append(Gap(question, tuple(d for i, d in enumerate(question.gold) if i not in there)))
    return found


def report(found: list[Gap], cuts: Iterable[int]) -> dict:
    """What `retrieve --gap-report` writes: counts, the best mean recall at each cut, and the questions with gaps."""

    def mean(k: int | None) -> float:
        return sum(gap.best_recall(k) for gap in found) / len(found)

    return {
        "n": len(found),
        "gold": sum(len(gap.question.gold) for gap in found),
        "missing": sum(len(gap.missing) for gap in found),
        "best_recall": mean(None),
        "best_recall_at": {str(k): mean(k) for k in cuts},
        "questions": [gap.to_json() for gap in found if gap.missing],
    }


def write_gaps(documents: Iterable[Document], known: list[Question], cuts: list[int], path: Path) -> None:
    """Writes and tells which gold paragraphs the corpus lacks."""
    told = report(gaps(known, documents), cuts)
    best = ", ".join(f"{value:.4f} at {k}" for k, value in told["best_recall_at"].items())
    print(f"the corpus lacks {told['missing']} of {told['gold']} gold paragraphs of {len(told['questions'])} questions")
    print(f"the best recall that a retriever could have is {told['best_recall']:.4f}: {best}")
    write_json(path, told)
    print(f"written to {path}")
