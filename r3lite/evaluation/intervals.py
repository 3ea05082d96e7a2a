"""Bootstrap over questions: sums of resampled questions, and percentile intervals. Knows numbers only."""

from collections.abc import Sequence

import numpy as np

CONFIDENCE = 95.0  # percent
ENDS = ((100 - CONFIDENCE) / 2, (100 + CONFIDENCE) / 2)
LARGEST_BLOCK = 4_000_000  # numbers drawn at once


def resampled_sums(table: np.ndarray, seed: int | Sequence[int], resamples: int) -> np.ndarray:
    """Sums [1 + resamples, metrics, k] of table [metrics, n, k]: over all n questions, then over n that are drawn.

    They are drawn with replacement (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 6); all
    metrics see the same draws.
    """
    metrics, n, k = table.shape
    generator = np.random.default_rng(seed)
    flat = table.transpose(1, 0, 2).reshape(n, -1)  # [n, metrics * k]
    at_once = max(1, min(resamples, LARGEST_BLOCK // n))
    blocks = [flat.sum(0, keepdims=True)]
    for start in range(0, resamples, at_once):
        count = min(at_once, resamples - start)
        drawn = generator.integers(n, size=(count, n)) + np.arange(count)[:, None] * n
        times = np.bincount(drawn.ravel(), minlength=count * n).reshape(count, n)  # how often each question was drawn
        blocks.append(times @ flat)
    return np.concatenate(blocks).reshape(1 + resamples, metrics, k)


def ratios(sums: np.ndarray) -> np.ndarray:
    """Numerators over denominators, from sums [..., 2]; nan if nothing is known."""
    with np.errstate(invalid="ignore"):
        return sums[..., 0] / sums[..., 1]


def interval(values: np.ndarray) -> dict[str, float | None]:
    """The first of `values`, that of all questions, and the percentile interval of the others; None if it is nan."""
    if np.isnan(values[0]):
        return {"value": None, "low": None, "high": None}
    low, high = np.nanpercentile(values[1:], ENDS)
    return {"value": float(values[0]), "low": float(low), "high": float(high)}
