"""Sums of metrics over tokens, added up over a round, and the means that they become."""

from torch import Tensor

from r3lite.rl.algorithms.base import GUIDED

Metrics = dict[str, Tensor | int]
TOKENS, GUIDED_TOKENS = "tokens", f"{GUIDED}tokens"  # how many tokens the sums are over


def summed(metrics: Metrics) -> Metrics:
    """Sums over tokens, without their gradients."""
    return {name: x.detach().sum() for name, x in metrics.items()}


def added(parts: list[Metrics]) -> Metrics:
    """Sums of several parts by name, added in their order."""
    total: Metrics = {}
    for part in parts:
        for name, x in part.items():
            total[name] = total.get(name, 0.0) + x
    return total


def means_of(sums: Metrics) -> dict[str, float]:
    """Means over tokens: of metrics named GUIDED over those that a teacher says something of, else over the others."""
    counts = {name: sums[name] for name in (TOKENS, GUIDED_TOKENS) if name in sums}
    return {
        name: float(total) / counts[GUIDED_TOKENS if name.startswith(GUIDED) else TOKENS]
        for name, total in sums.items()
        if name not in counts
    }
