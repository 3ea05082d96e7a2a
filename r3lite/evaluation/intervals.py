"""Bootstrap over questions: sums of resampled questions, and percentile intervals. Knows numbers only."""

from collections.abc import Sequence

import numpy as np

CONFIDENCE = 95.0  # percent
LOW_END = (100 - CONFIDENCE) / 2
HIGH_END = (100 + CONFIDENCE) / 2
LARGEST_BLOCK = 4_000_000  # numbers drawn at once


def resampled_sums(
    table: np.ndarray,
    seed: int | Sequence[int],
    resamples: int,
) -> np.ndarray:
    """Returns sums [1 + resamples, metrics, k] of table [metrics, n, k]: over all n questions, then, for each resample,
    over n drawn questions.

    Questions are drawn with replacement (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 6); all
    metrics see the same draws.
    """
    metrics, n, k = table.shape
    generator = np.random.default_rng(seed)
    by_question = table.transpose(1, 0, 2).reshape(n, -1)  # [n, metrics * k]
    block = max(1, min(resamples, LARGEST_BLOCK // n))
    sums = [by_question.sum(0, keepdims=True)]
    for start in range(0, resamples, block):
        count = min(block, resamples - start)
        draws = generator.integers(n, size=(count, n))
        # Each resample counts in a range of its own, so that one bincount serves the whole block.
        offsets = np.arange(count)[:, None] * n
        frequencies = np.bincount((draws + offsets).ravel(), minlength=count * n)
        sums.append(frequencies.reshape(count, n) @ by_question)
    return np.concatenate(sums).reshape(1 + resamples, metrics, k)


def ratios(sums: np.ndarray) -> np.ndarray:
    """Returns numerators over denominators [...], from sums [..., 2]; nan where both are 0, as nothing is known."""
    numerators = sums[..., 0]
    denominators = sums[..., 1]
    with np.errstate(invalid="ignore"):
        return numerators / denominators


def interval(values: np.ndarray) -> dict[str, float | None]:
    """Returns the first of `values` [1 + resamples], which is of all questions, and the percentile interval of the
    resamples; all three are None if the first is nan."""
    value = values[0]
    if np.isnan(value):
        return {"value": None, "low": None, "high": None}
    low, high = np.nanpercentile(values[1:], (LOW_END, HIGH_END))
    return {
        "value": float(value),
        "low": float(low),
        "high": float(high),
    }
