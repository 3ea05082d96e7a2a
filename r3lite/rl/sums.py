"""Metrics of a round, added up over tokens, chunk by chunk: off-policy tokens apart from the others.

The policy's own tokens have the metrics that every algorithm has, so that these mean the same for all; metrics whose
names begin with OFF_POLICY are of the tokens that it did not sample.
"""

from torch import Tensor

Sums = dict[str, Tensor | int]
OFF_POLICY = "off_policy/"


def summed(metrics: dict[str, Tensor], off_policy: Tensor | None = None) -> Sums:
    """Sums over the tokens that a metric is of, without gradients; `off_policy` says which these are, None: none."""
    if off_policy is None:
        return {name: x.detach().sum() for name, x in metrics.items()}
    on_policy = ~off_policy
    return {
        name: (x.detach() * (off_policy if name.startswith(OFF_POLICY) else on_policy)).sum()
        for name, x in metrics.items()
    }


def added(parts: list[Sums]) -> Sums:
    """Sums of several parts by name, added in their order."""
    total: Sums = {}
    for part in parts:
        for name, x in part.items():
            total[name] = total.get(name, 0.0) + x
    return total


def means_of(sums: Sums) -> dict[str, float]:
    """The means, by the counts of tokens that are among the sums."""
    off_policy = sums["off_policy_tokens"]
    on_policy = sums["tokens"] - off_policy
    return {
        name: float(total) / (off_policy if name.startswith(OFF_POLICY) else on_policy)
        for name, total in sums.items()
        if name not in ("tokens", "off_policy_tokens")
    }
