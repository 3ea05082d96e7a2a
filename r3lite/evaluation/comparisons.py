"""Two models on the same questions: the difference of each metric, with an interval and a p value by paired bootstrap.

Knows the marks of episodes; no files.
"""

from collections.abc import Sequence

import numpy as np

from r3lite.core.errors import R3LiteError
from r3lite.evaluation.intervals import interval, ratios, resampled_sums
from r3lite.evaluation.scores import Marks, metric_parts

RESAMPLES = 10_000
POOLED = ("em", "f1")  # the metrics of `compare_sets`
ROUNDING = 1e-12  # a smaller difference counts as 0: sums of the same numbers in another order differ by as much

# The marks of the answers of two models, a and b, to the same questions in the same order.
MarksPair = tuple[Sequence[Marks], Sequence[Marks]]


def valid_indices(evaluations: Sequence[Sequence[Marks]]) -> list[int]:
    """Returns the indices of the questions at which the retriever failed in none of the evaluations.

    All evaluations are of the same questions in the same order. Raises R3LiteError if there is no such question.
    """
    counts = [len(marks) for marks in evaluations]
    count = counts[0]
    assert count > 0 and set(counts) == {count}, f"marks of the same questions are needed, not {counts}"
    indices = []
    for i in range(count):
        failed = any(marks[i].failure for marks in evaluations)
        if not failed:
            indices.append(i)
    if not indices:
        cause = f"at each of the {count} questions the retriever failed in one of the evaluations"
        raise R3LiteError(cause, "Evaluate again when the retriever works.", code="retriever-failed")
    return indices


def compare(
    a: Sequence[Marks],
    b: Sequence[Marks],
    seed: int = 0,
) -> dict[str, dict]:
    """Returns for each metric that both models have: its values `a` and `b`, the `difference` b - a, the ends `low` and
    `high` of the difference's 95 % interval, and `p`.

    The marks are of the same questions in the same order. Each resample draws questions and takes both models' answers
    to them (Koehn 2004, W04-3250). A question for which a metric is unknown with one of the models, or at which a
    retriever failed, counts for neither. `p` is two-sided, the achieved significance level: 1 minus the level of the
    percentile interval that just reaches 0 (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, section
    15.4). A resample is added to each side, so that p is never 0.
    """
    indices = valid_indices([a, b])
    parts_of_a = metric_parts([a[i] for i in indices])
    parts_of_b = metric_parts([b[i] for i in indices])
    names = [name for name in parts_of_a if name in parts_of_b]
    pairs = [[parts_of_a[name], parts_of_b[name]] for name in names]
    # The four axes: metrics; a and b; the n questions; numerator and denominator.
    table = np.array(pairs, dtype=np.float64)  # [metrics, 2, n, 2]
    known_in_both = (table[..., 1] > 0).all(axis=1)  # [metrics, n]
    table *= known_in_both[:, None, :, None]
    by_question = table.transpose(0, 2, 1, 3)  # [metrics, n, 2, 2]
    # The four numbers of a question side by side, so that a and b are resampled together.
    columns = by_question.reshape(len(names), len(indices), 4)
    sums = resampled_sums(columns, seed, RESAMPLES)
    sums = sums.reshape(1 + RESAMPLES, len(names), 2, 2)
    values = ratios(sums)  # [1 + resamples, metrics, a and b]
    comparison = {}
    for i, name in enumerate(names):
        if not np.isnan(values[0, i]).any():
            comparison[name] = difference(values[:, i])
    return comparison


def difference(values: np.ndarray) -> dict[str, float]:
    """Returns what `compare` returns for a metric, from its values [1 + resamples, a and b].

    The first row is of all questions. Each further row is of a resample; it is nan if the metric is known for no
    question of the resample.
    """
    differences = values[:, 1] - values[:, 0]
    value_and_ends = interval(differences)
    resampled = differences[1:]
    resampled = resampled[~np.isnan(resampled)]
    count_at_most_0 = (resampled <= ROUNDING).sum()
    count_at_least_0 = (resampled >= -ROUNDING).sum()
    smaller_count = min(count_at_most_0, count_at_least_0)
    p = 2 * (1 + smaller_count) / (1 + len(resampled))
    return {
        "a": float(values[0, 0]),
        "b": float(values[0, 1]),
        "difference": value_and_ends["value"],
        "low": value_and_ends["low"],
        "high": value_and_ends["high"],
        "p": float(min(1.0, p)),
    }


def compare_sets(sets: Sequence[Sequence[MarksPair]], seed: int = 0) -> dict:
    """Returns the differences of EM and F1 as `compare` does, for several sets of questions and several training seeds.

    A set is a list of pairs (a, b), one per seed, all over the same questions in the same order. The scores of a
    question are averaged over the seeds; the score of a set is their mean over its questions. In the result, `sets` has
    the differences of each set, and `metrics` those of the mean over sets, which all weigh the same.

    Questions at which a retriever failed with any seed are left out.

    Each resample draws questions of every set, independently of the other sets. The interval does not include what
    another training seed would change. How wide it is: if two models differ in EM on the share d of a set's n
    questions, the standard error of the mean of k sets is about sqrt(sum of d / n over the sets) / k.
    """
    by_set = []  # of each set, the means [1 + resamples, metrics, a and b]
    for number, pairs in enumerate(sets):
        indices = valid_indices([marks for pair in pairs for marks in pair])
        by_seed = []
        for a, b in pairs:
            by_seed.append([_pooled(a, indices), _pooled(b, indices)])
        means = np.mean(by_seed, axis=0)  # [a and b, metrics, n]
        table = means.transpose(1, 2, 0)  # [metrics, n, a and b]
        sums = resampled_sums(table, (seed, number), RESAMPLES)
        by_set.append(sums / table.shape[1])
    mean = np.mean(by_set, axis=0)
    return {
        "metrics": _differences(mean),
        "sets": [_differences(values) for values in by_set],
    }


def _pooled(marks: Sequence[Marks], indices: Sequence[int]) -> list[list[float]]:
    """Returns POOLED, the metrics that `compare_sets` compares, of the questions at n indices: [metrics, n]."""
    em = [marks[i].em for i in indices]
    f1 = [marks[i].f1 for i in indices]
    return [em, f1]


def _differences(values: np.ndarray) -> dict[str, dict[str, float]]:
    """Returns the `difference` of each metric of POOLED by its name, from values [1 + resamples, metrics, a and b]."""
    return {name: difference(values[:, i]) for i, name in enumerate(POOLED)}
