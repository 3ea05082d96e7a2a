"""Two models on the same questions: the difference of each metric, with an interval and a p value by paired bootstrap.

Knows the marks of episodes; no files.
"""

from collections.abc import Sequence

import numpy as np

from r3lite.core.errors import R3LiteError
from r3lite.evaluation.intervals import interval, ratios, resampled_sums
from r3lite.evaluation.scores import Marks, parts

RESAMPLES = 10_000
ROUNDING = 1e-12  # a smaller difference is none: sums of the same numbers in another order differ by as much


def pairs(a: Sequence[Marks], b: Sequence[Marks]) -> list[tuple[Marks, Marks]]:
    """Both models' marks of each question at which neither's retriever failed.

    Raises R3LiteError if there is no such question.
    """
    assert len(a) == len(b) > 0, f"pairs are needed: {len(a)} and {len(b)} episodes"
    whole = [(ours, theirs) for ours, theirs in zip(a, b) if not (ours.failure or theirs.failure)]
    if not whole:
        cause = f"at each of the {len(a)} questions the retriever failed in one of the two evaluations"
        raise R3LiteError(cause, "Evaluate again when the retriever works.")
    return whole


def compare(a: Sequence[Marks], b: Sequence[Marks], seed: int = 0) -> dict[str, dict]:
    """For each metric that both have, over the same questions in the same order: its value `a` and `b`, `difference`
    b - a, the ends of its 95 % interval `low` and `high`, and `p`.

    Each resample draws questions and takes both models' answers to them (Koehn 2004, W04-3250). A question for which a
    metric is unknown in one of the two, or at which a retriever failed, counts in neither. `p` is two-sided: the
    achieved significance level, that is 1 less the level of the percentile interval that just reaches 0 (Efron and
    Tibshirani, An Introduction to the Bootstrap, 1993, section 15.4). With one resample added to each side it is
    never 0.
    """
    whole = pairs(a, b)
    ours, theirs = parts([ours for ours, _ in whole]), parts([theirs for _, theirs in whole])
    names = [name for name in ours if name in theirs]
    table = np.array([[ours[name], theirs[name]] for name in names], dtype=np.float64)  # [metrics, 2, n, 2]
    table *= (table[..., 1] > 0).all(axis=1)[:, None, :, None]
    sums = resampled_sums(table.transpose(0, 2, 1, 3).reshape(len(names), len(whole), 4), seed, RESAMPLES)
    both = ratios(sums.reshape(1 + RESAMPLES, len(names), 2, 2))  # [1 + resamples, metrics, a and b]
    found = {}
    for i, name in enumerate(names):
        if np.isnan(both[0, i]).any():
            continue
        differences = both[:, i, 1] - both[:, i, 0]
        spread, (ours_of_all, theirs_of_all) = interval(differences), both[0, i].tolist()
        known = differences[1:][~np.isnan(differences[1:])]
        rarer = min((known <= ROUNDING).sum(), (known >= -ROUNDING).sum())  # on that side of 0; 0 is on both
        p = float(min(1.0, 2 * (1 + rarer) / (1 + len(known))))
        ends = {"low": spread["low"], "high": spread["high"], "p": p}
        found[name] = {"a": ours_of_all, "b": theirs_of_all, "difference": spread["value"]} | ends
    return found
