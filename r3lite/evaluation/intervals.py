"""Bootstrap over questions: sums of resampled questions, and percentile intervals. Knows numbers only."""

from collections.abc import Sequence

import numpy as np

CONFIDENCE = 95.0  # percent
LOW_END = (100 - CONFIDENCE) / 2
HIGH_END = (100 + CONFIDENCE) / 2
LARGEST_BLOCK = 4_000_000  # random numbers in memory at once


def resampled_sums(
    table: np.ndarray,
    seed: int | Sequence[int],
    resamples: int,
) -> np.ndarray:
    """Returns sums [1 + resamples, metrics, k] over the questions of a table [metrics, n questions, k numbers].

    The first sum is over all questions; each further one is of a resample, over n drawn questions. Questions are drawn
    with replacement (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 6), the same for all
    metrics.
    """
    metrics, n, k = table.shape
    generator = np.random.default_rng(seed)
    by_question = table.transpose(1, 0, 2).reshape(n, -1)  # [n, metrics * k]
    block = max(1, min(resamples, LARGEST_BLOCK // n))
    sums = [by_question.sum(0, keepdims=True)]
    for start in range(0, resamples, block):
        count = min(block, resamples - start)
        draws = generator.integers(n, size=(count, n))
        # Resample i counts its draws in bins i n to i n + n - 1, so that one bincount serves the whole block.
        offsets = np.arange(count)[:, None] * n
        frequencies = np.bincount((draws + offsets).ravel(), minlength=count * n)
        sums.append(frequencies.reshape(count, n) @ by_question)
    return np.concatenate(sums).reshape(1 + resamples, metrics, k)


def ratios(sums: np.ndarray) -> np.ndarray:
    """Returns numerators divided by denominators [...], from sums [..., 2]; nan where both are 0: nothing is known."""
    numerators = sums[..., 0]
    denominators = sums[..., 1]
    with np.errstate(invalid="ignore"):
        return numerators / denominators


def interval(values: np.ndarray) -> dict[str, float | None]:
    """Returns the `value` of all questions, and the ends `low` and `high` of the percentile interval of the resamples.

    `values` [1 + resamples] has the value of all questions first. All three are None if it is nan.
    """
    value = values[0]
    if np.isnan(value):
        return {"value": None, "low": None, "high": None}
    low, high = np.nanpercentile(values[1:], (LOW_END, HIGH_END))
    return {
        "value": float(value),
        "low": float(low),
        "high": float(high),
    }
