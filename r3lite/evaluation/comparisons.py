"""Two models on the same questions: the difference of each metric, with an interval and a p value by paired bootstrap.

Knows the marks of episodes; no files.
"""

from collections.abc import Sequence

import numpy as np

from r3lite.core.errors import R3LiteError
from r3lite.evaluation.intervals import interval, ratios, resampled_sums
from r3lite.evaluation.scores import Marks, parts

RESAMPLES = 10_000
POOLED = ("em", "f1")  # the metrics of `compare_sets`
ROUNDING = 1e-12  # a smaller difference is none: sums of the same numbers in another order differ by as much


def countable(evaluations: Sequence[Sequence[Marks]]) -> list[int]:
    """The places of the questions at which no retriever failed in any of the evaluations of the same questions.

    Raises R3LiteError if there is no such question.
    """
    counts = [len(marks) for marks in evaluations]
    count = counts[0]
    assert count > 0 and set(counts) == {count}, f"marks of the same questions are needed, not {counts}"
    places = [place for place in range(count) if not any(marks[place].failure for marks in evaluations)]
    if not places:
        cause = f"at each of the {count} questions the retriever failed in one of the evaluations"
        raise R3LiteError(cause, "Evaluate again when the retriever works.")
    return places


def compare(a: Sequence[Marks], b: Sequence[Marks], seed: int = 0) -> dict[str, dict]:
    """For each metric that both have, over the same questions in the same order: its value `a` and `b`, `difference`
    b - a, the ends of its 95 % interval `low` and `high`, and `p`.

    Each resample draws questions and takes both models' answers to them (Koehn 2004, W04-3250). A question for which a
    metric is unknown in one of the two, or at which a retriever failed, counts in neither. `p` is two-sided: the
    achieved significance level, that is 1 less the level of the percentile interval that just reaches 0 (Efron and
    Tibshirani, An Introduction to the Bootstrap, 1993, section 15.4). With one resample added to each side it is
    never 0.
    """
    whole = countable([a, b])
    ours = parts([a[place] for place in whole])
    theirs = parts([b[place] for place in whole])
    names = [name for name in ours if name in theirs]
    table = np.array([[ours[name], theirs[name]] for name in names], dtype=np.float64)  # [metrics, 2, n, 2]
    table *= (table[..., 1] > 0).all(axis=1)[:, None, :, None]
    sums = resampled_sums(table.transpose(0, 2, 1, 3).reshape(len(names), len(whole), 4), seed, RESAMPLES)
    both = ratios(sums.reshape(1 + RESAMPLES, len(names), 2, 2))  # [1 + resamples, metrics, a and b]
    return {name: difference(both[:, i]) for i, name in enumerate(names) if not np.isnan(both[0, i]).any()}


def difference(both: np.ndarray) -> dict[str, float]:
    """What `compare` says of a metric, from its values [1 + resamples, 2] of a and b: those of all questions, then
    those of each resample, nan if it has no question for which the metric is known."""
    differences = both[:, 1] - both[:, 0]
    spread = interval(differences)
    known = differences[1:][~np.isnan(differences[1:])]
    rarer = min((known <= ROUNDING).sum(), (known >= -ROUNDING).sum())  # on that side of 0; 0 is on both
    p = float(min(1.0, 2 * (1 + rarer) / (1 + len(known))))
    values = {"a": float(both[0, 0]), "b": float(both[0, 1]), "difference": spread["value"]}
    return values | {"low": spread["low"], "high": spread["high"], "p": p}


def compare_sets(sets: Sequence[Sequence[tuple[Sequence[Marks], Sequence[Marks]]]], seed: int = 0) -> dict:
    """What `compare` says of EM and F1, for several sets of questions and several training seeds.

    A set is a list of pairs (a, b), one per seed, all over the same questions in the same order. The scores of a
    question are averaged over the seeds first; then a set is the mean over its questions, and the result the mean over
    sets, which all weigh the same. `metrics` is of that mean, `sets` has the same of each set.

    Questions at which a retriever failed with any seed are left out.

    Each resample draws questions of every set, independently of the other sets: with d the share of questions on which
    two models differ in EM, the standard error of the mean of k sets is sqrt(sum of d / n over the sets) / k. What
    another training seed would change is not in it.
    """
    of_sets = []  # [1 + resamples, metrics, a and b] of each set
    for number, pairs in enumerate(sets):
        places = countable([marks for pair in pairs for marks in pair])
        of_seeds = [[_pooled(marks, places) for marks in pair] for pair in pairs]
        table = np.mean(of_seeds, axis=0).transpose(1, 2, 0)  # [metrics, n, a and b]
        sums = resampled_sums(table, (seed, number), RESAMPLES)
        of_sets.append(sums / table.shape[1])
    mean = np.mean(of_sets, axis=0)
    return {"metrics": _differences(mean), "sets": [_differences(of_set) for of_set in of_sets]}


def _pooled(marks: Sequence[Marks], places: Sequence[int]) -> list[list[float]]:
    """The metrics that `compare_sets` compares, of the questions at n places: [metrics, n]."""
    return [[marks[place].em for place in places], [marks[place].f1 for place in places]]


def _differences(both: np.ndarray) -> dict[str, dict[str, float]]:
    """By the name of the metric, from values [1 + resamples, metrics, a and b]."""
    return {name: difference(both[:, i]) for i, name in enumerate(POOLED)}
