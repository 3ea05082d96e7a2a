"""Scores of a set of episodes: means with bootstrap intervals, also by number of hops and by type of question.

Knows finished episodes and lines of predictions.jsonl; no model, no files. A question at which the retriever failed
counts in no score: its answer says nothing about the model.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from r3lite.core.answer_match import Overlap, answer_scores, best_overlap, combined_score, rouge_l, rule_of
from r3lite.core.episode import Episode, Step
from r3lite.core.errors import R3LiteError
from r3lite.core.records import Record
from r3lite.evaluation.intervals import interval, ratios, resampled_sums
from r3lite.evaluation.supporting_facts import facts_match, joint, retrieved_facts
from r3lite.evaluation.text_overlap import corpus_bleu, sentence_bleu

METRICS = ("em", "f1", "format_adherence", "retrieval_recall", "combined", "mean_searches")
FULL_RECALL_EM = "em_full_recall"  # exact match over the episodes that retrieved every gold paragraph
# Means over the questions for which they are known, under the same name in predictions.jsonl.
MEANS = (
    "reasoning_tokens", "sp_em", "sp_f1", "sp_precision", "sp_recall", "joint_em", "joint_f1", "rouge_l", "bleu",
    "bert_score", "reasoning_accuracy", "query_rationality",
)  # fmt: skip
RESAMPLES = 2000


@dataclass(frozen=True)
class Marks:
    """What is counted of one episode. `recall` and `judged` are None if they are unknown."""

    em: float
    f1: float
    recall: float | None
    well_formed: int  # of its steps
    steps: int
    searches: int
    hops: int
    judged: bool | None = None
    type: str = ""
    means: dict[str, float] = field(default_factory=dict)  # those of MEANS that are known
    failure: str | None = None  # why the retriever failed at a query; then the others are no scores

    @staticmethod
    def of(episode: Episode, judged: bool | None = None, bert_score: float | None = None) -> "Marks":
        question = episode.question
        em, f1 = answer_scores(episode)
        means = {
            "reasoning_tokens": episode.tokens_written,
            **(_facts(episode, em) if question.gold else {}),
            "rouge_l": max(rouge_l(episode.prediction, answer).f1 for answer in question.answers),
            "bleu": sentence_bleu(episode.prediction, question.answers),
            "bert_score": bert_score,
        }
        known = {name: float(value) for name, value in means.items() if value is not None}
        counts = _counts(episode.steps)
        about = question.hop_count, judged, question.type, known, episode.failure
        return Marks(em, f1, episode.recall, *counts, *about)

    @staticmethod
    def from_json(record: Record) -> "Marks":
        """The marks of a line of predictions.jsonl, also of one that an earlier version of r3lite wrote."""
        return Marks(
            record.number("em", low=0, high=1),
            record.number("f1", low=0, high=1),
            record.number("recall", None, low=0, high=1),
            *_counts([Step.from_json(step) for step in record.records("steps")]),
            record.whole("hops", 1, low=1),
            record.flag("judged", None),
            record.text("type", "", blank=True),
            {name: record.number(name) for name in MEANS if name in record},
            record.text("failure", None),
        )

    def to_json(self) -> dict:
        """What a line of predictions.jsonl has of them beside the episode's own keys."""
        line = {"em": self.em, "f1": self.f1, "recall": self.recall, "hops": self.hops, "type": self.type, **self.means}
        return line | ({} if self.judged is None else {"judged": self.judged})


def _counts(steps: Sequence[Step]) -> tuple[int, int, int]:
    """How many steps are well-formed, how many there are, and how many searches they make."""
    return sum(not s.faults for s in steps), len(steps), sum(len(s.searches) for s in steps)


def _facts(episode: Episode, em: float) -> dict[str, float]:
    """Supporting facts and joint scores of an episode whose answer has that EM."""
    answer = Overlap(0.0, 0.0)  # if it gave none, as its EM and F1 are then
    if episode.prediction.strip():
        answer = best_overlap(episode.prediction, episode.question.answers, rule_of(episode.question))
    sp_em, sp = facts = facts_match(*retrieved_facts(episode))
    joint_em, both = joint((em, answer), facts)
    scores = {"sp_em": sp_em, "sp_f1": sp.f1, "sp_precision": sp.precision, "sp_recall": sp.recall}
    return scores | {"joint_em": joint_em, "joint_f1": both.f1}


def combined(marks: Marks) -> float | None:
    """The combined score of a question; None if recall is unknown."""
    if marks.recall is None:
        return None
    return combined_score(marks.em, marks.f1, marks.recall, marks.hops)


def parts(marks: Sequence[Marks]) -> dict[str, list[tuple[float, float]]]:
    """Of each metric that is known of any question (and of METRICS and FULL_RECALL_EM in any case), two numbers of each
    question: what is summed up, and what the sum is divided by; both 0 if it is unknown."""
    found = {
        "em": [(m.em, 1) for m in marks],
        "f1": [(m.f1, 1) for m in marks],
        "format_adherence": [(m.well_formed, m.steps) for m in marks],
        "retrieval_recall": [_known(m.recall) for m in marks],
        "combined": [_known(combined(m)) for m in marks],
        "mean_searches": [(m.searches, 1) for m in marks],
        FULL_RECALL_EM: [_known(m.em if m.recall == 1 else None) for m in marks],
    }
    if any(m.judged is not None for m in marks):
        found["judge_accuracy"] = [_known(m.judged) for m in marks]
    known = [name for name in MEANS if any(name in m.means for m in marks)]
    return found | {name: [_known(m.means.get(name)) for m in marks] for name in known}


def _known(value: float | bool | None) -> tuple[float, int]:
    return (0.0, 0) if value is None else (float(value), 1)


def without_failures(marks: Sequence[Marks]) -> list[Marks]:
    """The marks that count. Raises R3LiteError if the retriever failed on every question."""
    whole = [m for m in marks if not m.failure]
    if not whole:
        raise R3LiteError(f"the retriever failed on every question: {marks[0].failure}", "Fix that, and try again.")
    return whole


def scores(marks: Sequence[Marks], seed: int = 0) -> dict:
    """`n` and each metric as {"value", "low", "high"} with a 95 % bootstrap interval over questions.

    Every metric is a mean over the questions for which it is known (None if there are none), except that format
    adherence is a mean over steps. Those of METRICS are always there, others if they are known of any question.
    FULL_RECALL_EM has its own number of questions, "n", and is None if no episode retrieved every gold paragraph.
    Questions at which the retriever failed are left out, also of `n`.
    """
    marks = without_failures(marks)
    counted = parts(marks)
    table = np.array(list(counted.values()), dtype=np.float64)  # [metrics, n, 2]
    found = ratios(resampled_sums(table, seed, RESAMPLES))  # [1 + resamples, metrics]
    entries = {name: interval(found[:, i]) for i, name in enumerate(counted)}
    full = sum(m.recall == 1 for m in marks)
    entries[FULL_RECALL_EM] = entries[FULL_RECALL_EM] | {"n": full} if full else None
    return {"n": len(marks)} | entries


def scores_by(group: Callable[[Marks], int | str], marks: Sequence[Marks], seed: int = 0) -> dict[str, dict]:
    """The same for each group of questions, such as those of one type; questions of an empty name are in none."""
    names = sorted({group(m) for m in marks if not m.failure} - {""})
    return {str(name): scores([m for m in marks if group(m) == name], seed) for name in names}


def summary(episodes: Sequence[Episode], marks: Sequence[Marks], seed: int) -> dict:
    """What scores.json has of episodes and their marks. Those at which the retriever failed are left out."""
    found = scores(marks, seed)
    whole = [e for e in episodes if not e.failure]
    faults = Counter(fault for e in whole for step in e.steps for fault in step.faults)
    found |= {
        "corpus_bleu": corpus_bleu([e.prediction for e in whole], [e.question.answers for e in whole]),
        "by_hops": scores_by(lambda m: m.hops, marks, seed),
        "by_type": scores_by(lambda m: m.type, marks, seed),
        "faults": dict(faults.most_common()),
        "finish": {f: sum(e.finish == f for e in whole) for f in sorted({e.finish for e in whole})},
    }
    failed = len(episodes) - len(whole)
    return found | ({"retrieval_failures": failed} if failed else {})
