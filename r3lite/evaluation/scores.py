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
# Further metrics: means over the questions for which they are known. predictions.jsonl has them by these names.
MEANS = (
    "reasoning_tokens", "sp_em", "sp_f1", "sp_precision", "sp_recall", "joint_em", "joint_f1", "rouge_l", "bleu",
    "bert_score", "reasoning_accuracy", "query_rationality",
)  # fmt: skip
RESAMPLES = 2000


@dataclass(frozen=True)
class Marks:
    """The numbers of one episode of which the scores are made. `recall` and `judged` are None if they are unknown."""

    em: float
    f1: float
    recall: float | None
    well_formed: int  # of its steps
    steps: int
    searches: int
    hops: int
    judged: bool | None = None
    type: str = ""
    means: dict[str, float] = field(default_factory=dict)  # the values of the metrics of MEANS that are known
    failure: str | None = None  # why the retriever failed at a query; then the other numbers count in no score

    @staticmethod
    def of(
        episode: Episode,
        judged: bool | None = None,
        bert_score: float | None = None,
    ) -> "Marks":
        """Returns the marks of a finished episode."""
        question = episode.question
        em, f1 = answer_scores(episode)
        means: dict[str, float | None] = {"reasoning_tokens": episode.tokens_written}
        if question.gold:
            means |= _fact_scores(episode, em)
        overlaps = [rouge_l(episode.prediction, answer) for answer in question.answers]
        means["rouge_l"] = max(overlap.f1 for overlap in overlaps)
        means["bleu"] = sentence_bleu(episode.prediction, question.answers)
        means["bert_score"] = bert_score
        return Marks(
            em=em,
            f1=f1,
            recall=episode.recall,
            **_counts(episode.steps),
            hops=question.hop_count,
            judged=judged,
            type=question.type,
            means={name: float(value) for name, value in means.items() if value is not None},
            failure=episode.failure,
        )

    @staticmethod
    def from_json(record: Record) -> "Marks":
        """Returns the marks of a line of predictions.jsonl, also of one that an earlier version of r3lite wrote."""
        return Marks(
            em=record.number("em", low=0, high=1),
            f1=record.number("f1", low=0, high=1),
            recall=record.number("recall", None, low=0, high=1),
            **_counts([Step.from_json(step) for step in record.records("steps")]),
            hops=record.whole("hops", 1, low=1),
            judged=record.flag("judged", None),
            type=record.text("type", "", blank=True),
            means={name: record.number(name) for name in MEANS if name in record},
            failure=record.text("failure", None),
        )

    def to_json(self) -> dict:
        """Returns the part of a line of predictions.jsonl that the episode itself does not have."""
        line = {
            "em": self.em,
            "f1": self.f1,
            "recall": self.recall,
            "hops": self.hops,
            "type": self.type,
            **self.means,
        }
        if self.judged is not None:
            line["judged"] = self.judged
        return line


def _counts(steps: Sequence[Step]) -> dict[str, int]:
    """Returns how many steps are well-formed, how many there are, and how many searches they make."""
    return {
        "well_formed": sum(not step.faults for step in steps),
        "steps": len(steps),
        "searches": sum(len(step.searches) for step in steps),
    }


def _fact_scores(episode: Episode, em: float) -> dict[str, float]:
    """Returns the scores of supporting facts and the joint scores of an episode; `em` is the EM of its answer."""
    answer = Overlap(precision=0.0, recall=0.0)  # if the episode has no answer
    if episode.prediction.strip():
        question = episode.question
        answer = best_overlap(episode.prediction, question.answers, rule_of(question))
    retrieved, gold = retrieved_facts(episode)
    sp_em, sp = facts_match(retrieved, gold)
    joint_em, joint_overlap = joint((em, answer), (sp_em, sp))
    return {
        "sp_em": sp_em,
        "sp_f1": sp.f1,
        "sp_precision": sp.precision,
        "sp_recall": sp.recall,
        "joint_em": joint_em,
        "joint_f1": joint_overlap.f1,
    }


def combined(marks: Marks) -> float | None:
    """Returns the combined score of a question; None if recall is unknown."""
    if marks.recall is None:
        return None
    return combined_score(marks.em, marks.f1, marks.recall, hops=marks.hops)


def metric_parts(marks: Sequence[Marks]) -> dict[str, list[tuple[float, float]]]:
    """Returns, for each metric, the numerator and the denominator of each question.

    The score of a metric is the sum of the numerators divided by the sum of the denominators. Both are 0 if the metric
    is unknown for the question. A metric that is known for no question is left out, unless it is one of METRICS or
    FULL_RECALL_EM.
    """
    table = {
        "em": [(m.em, 1) for m in marks],
        "f1": [(m.f1, 1) for m in marks],
        "format_adherence": [(m.well_formed, m.steps) for m in marks],
        "retrieval_recall": [_part(m.recall) for m in marks],
        "combined": [_part(combined(m)) for m in marks],
        "mean_searches": [(m.searches, 1) for m in marks],
        FULL_RECALL_EM: [_part(_em_at_full_recall(m)) for m in marks],
    }
    if any(m.judged is not None for m in marks):
        table["judge_accuracy"] = [_part(m.judged) for m in marks]
    for name in MEANS:
        if any(name in m.means for m in marks):
            table[name] = [_part(m.means.get(name)) for m in marks]
    return table


def _em_at_full_recall(marks: Marks) -> float | None:
    """Returns EM if the episode retrieved every gold paragraph, else None."""
    if marks.recall != 1:
        return None
    return marks.em


def _part(value: float | bool | None) -> tuple[float, int]:
    """Returns the numerator and the denominator of a value; both are 0 if it is None."""
    if value is None:
        return 0.0, 0
    return float(value), 1


def without_failures(marks: Sequence[Marks]) -> list[Marks]:
    """Returns the marks of the questions at which no retriever failed; raises R3LiteError if there are none."""
    valid = [m for m in marks if not m.failure]
    if not valid:
        raise R3LiteError(
            f"the retriever failed on every question: {marks[0].failure}",
            "Fix that, and try again.",
            code="retriever-failed",
        )
    return valid


def scores(marks: Sequence[Marks], seed: int = 0) -> dict:
    """Returns `n` and each metric as {"value", "low", "high"} with a 95 % bootstrap interval over questions.

    Every metric is a mean over the questions for which it is known (None if there are none), except that format
    adherence is a mean over steps. METRICS are always there, other metrics if they are known for any question.
    FULL_RECALL_EM has its own number of questions, "n", and is None if no episode retrieved every gold paragraph.
    Questions at which the retriever failed are left out, also of `n`.
    """
    marks = without_failures(marks)
    parts_by_metric = metric_parts(marks)
    table = np.array(list(parts_by_metric.values()), dtype=np.float64)  # [metrics, n, 2]
    sums = resampled_sums(table, seed, RESAMPLES)
    means = ratios(sums)  # [1 + resamples, metrics]
    entries: dict = {"n": len(marks)}
    for i, name in enumerate(parts_by_metric):
        entries[name] = interval(means[:, i])
    full_recall = sum(m.recall == 1 for m in marks)
    if full_recall:
        entries[FULL_RECALL_EM]["n"] = full_recall
    else:
        entries[FULL_RECALL_EM] = None
    return entries


def scores_by(
    group: Callable[[Marks], int | str],
    marks: Sequence[Marks],
    seed: int = 0,
) -> dict[str, dict]:
    """Returns the scores of each group of questions by its name; the group "" is left out.

    `group` returns the group of a question from its marks, such as its type.
    """
    groups = {group(m) for m in marks if not m.failure}
    names = sorted(groups - {""})
    by_name = {}
    for name in names:
        group_marks = [m for m in marks if group(m) == name]
        by_name[str(name)] = scores(group_marks, seed)
    return by_name


def summary(
    episodes: Sequence[Episode],
    marks: Sequence[Marks],
    seed: int,
) -> dict:
    """Returns the scores of scores.json from episodes and the marks of the same episodes.

    Episodes at which the retriever failed are left out.
    """
    valid = [episode for episode in episodes if not episode.failure]
    predictions = [episode.prediction for episode in valid]
    answers = [episode.question.answers for episode in valid]
    faults: Counter[str] = Counter()
    for episode in valid:
        for step in episode.steps:
            faults.update(step.faults)
    ends = Counter(episode.finish for episode in valid)
    entries = scores(marks, seed)
    entries |= {
        "corpus_bleu": corpus_bleu(predictions, answers),
        "by_hops": scores_by(lambda m: m.hops, marks, seed),
        "by_type": scores_by(lambda m: m.type, marks, seed),
        "faults": dict(faults.most_common()),
        "finish": {finish: ends[finish] for finish in sorted(ends)},
    }
    failures = len(episodes) - len(valid)
    if failures:
        entries["retrieval_failures"] = failures
    return entries
