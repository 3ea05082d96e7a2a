"""Scores of a set of episodes: means with bootstrap intervals, by number of hops, and the difference of two models.

Knows finished episodes; no model, no files.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from r3lite.answer_match import answer_scores
from r3lite.episode import Episode

METRICS = ("em", "f1", "format_adherence", "retrieval_recall", "combined", "mean_searches")
CONFIDENCE = 95.0  # percent
RESAMPLES = 2000
LARGEST_BLOCK = 4_000_000  # numbers drawn at once


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

    @staticmethod
    def of(episode: Episode, judged: bool | None = None) -> "Marks":
        em, best_f1 = answer_scores(episode)
        return Marks(
            em=em,
            f1=best_f1,
            recall=episode.recall,
            well_formed=sum(not s.faults for s in episode.steps),
            steps=len(episode.steps),
            searches=episode.searches,
            hops=episode.question.hop_count,
            judged=judged,
        )


def hop_weight(hops: int) -> float:
    """1 up to two hops, 1.5 at three, 2 from four on."""
    return min(max(hops / 2, 1.0), 2.0)


def combined(marks: Marks) -> float | None:
    """0.8 (0.6 EM + 0.3 F1) + 0.2 recall, times the hop weight: up to 1.84. None if recall is unknown."""
    if marks.recall is None:
        return None
    return (0.8 * (0.6 * marks.em + 0.3 * marks.f1) + 0.2 * marks.recall) * hop_weight(marks.hops)


def scores(marks: Sequence[Marks], seed: int = 0) -> dict:
    """`n` and each metric as {"value", "low", "high"} with a 95 % bootstrap interval over questions.

    Every metric is a mean over the questions for which it is known (None if there are none), except that format
    adherence is a mean over steps. `judge_accuracy` is included if anything was judged.
    """
    parts = {  # metric -> (what is summed up, what it is divided by), one entry per question
        "em": [(m.em, 1) for m in marks],
        "f1": [(m.f1, 1) for m in marks],
        "format_adherence": [(m.well_formed, m.steps) for m in marks],
        "retrieval_recall": [_known(m.recall) for m in marks],
        "combined": [_known(combined(m)) for m in marks],
        "mean_searches": [(m.searches, 1) for m in marks],
    }
    if any(m.judged is not None for m in marks):
        parts["judge_accuracy"] = [_known(m.judged) for m in marks]
    table = np.array(list(parts.values()), dtype=np.float64)  # [metrics, n, 2]
    sums = np.concatenate([table.sum(1)[None], _resampled_sums(table, seed)])  # [1 + resamples, metrics, 2]
    with np.errstate(invalid="ignore"):
        ratios = sums[..., 0] / sums[..., 1]  # nan if a resample holds no question for which it is known
    return {"n": len(marks)} | {name: _interval(ratios[:, i]) for i, name in enumerate(parts)}


def scores_by_hops(marks: Sequence[Marks], seed: int = 0) -> dict[str, dict]:
    """The same for the questions of each number of hops."""
    return {str(h): scores([m for m in marks if m.hops == h], seed) for h in sorted({m.hops for m in marks})}


def paired_difference(
    a: Sequence[float], b: Sequence[float], seed: int = 0, resamples: int = 10_000
) -> tuple[float, float, float]:
    """Mean of a - b over the same questions in the same order, with a 95 % interval by bootstrap over the pairs."""
    if len(a) != len(b) or not len(a):
        raise ValueError(f"pairs are needed: {len(a)} and {len(b)} scores")
    difference = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    table = np.stack([difference, np.ones_like(difference)], axis=1)[None]  # [1, n, 2]
    means = _resampled_sums(table, seed, resamples)[:, 0, 0] / len(difference)
    low, high = np.percentile(means, _ENDS)
    return float(difference.mean()), float(low), float(high)


_ENDS = ((100 - CONFIDENCE) / 2, (100 + CONFIDENCE) / 2)


def _known(value: float | bool | None) -> tuple[float, int]:
    return (0.0, 0) if value is None else (float(value), 1)


def _resampled_sums(table: np.ndarray, seed: int, resamples: int = RESAMPLES) -> np.ndarray:
    """Sums [resamples, metrics, 2] of table [metrics, n, 2] over n questions drawn with replacement.

    All metrics see the same draws.
    """
    n = table.shape[1]
    generator = np.random.default_rng(seed)
    flat = table.transpose(1, 0, 2).reshape(n, -1)  # [n, metrics * 2]
    at_once = max(1, min(resamples, LARGEST_BLOCK // n))
    blocks = []
    for start in range(0, resamples, at_once):
        count = min(at_once, resamples - start)
        drawn = generator.integers(n, size=(count, n)) + np.arange(count)[:, None] * n
        times = np.bincount(drawn.ravel(), minlength=count * n).reshape(count, n)  # how often each question was drawn
        blocks.append(times @ flat)
    return np.concatenate(blocks).reshape(resamples, table.shape[0], 2)


def _interval(ratios: np.ndarray) -> dict[str, float | None]:
    """The first ratio, and the interval of the others."""
    if np.isnan(ratios[0]):
        return {"value": None, "low": None, "high": None}
    low, high = np.nanpercentile(ratios[1:], _ENDS)
    return {"value": float(ratios[0]), "low": float(low), "high": float(high)}
