"""Metrics of a round, added up over tokens, chunk by chunk, and the means that they become.

There are three kinds of tokens, and a metric's name begins with the kind that it is of: OFF_POLICY are those that the
policy did not sample, GUIDED those that a teacher says something of. All other metrics are of the policy's own tokens
that learn from rewards, so that these mean the same for every algorithm.
"""

from torch import Tensor

Sums = dict[str, Tensor | int]
OFF_POLICY, GUIDED = "off_policy/", "teacher/"
TOKENS = "tokens"  # after the kind: how many tokens the sums are over


def kind(name: str) -> str:
    """The kind of tokens that a metric is of: what its name begins with."""
    return next((prefix for prefix in (OFF_POLICY, GUIDED) if name.startswith(prefix)), "")


def summed(metrics: dict[str, Tensor], off_policy: Tensor | None = None) -> Sums:
    """Sums over the tokens that a metric is of, without gradients; `off_policy` says which these are, None: none."""
    if off_policy is None:
        return {name: x.detach().sum() for name, x in metrics.items()}
    masks = {name: off_policy if kind(name) == OFF_POLICY else ~off_policy for name in metrics}
    return {name: (x.detach() * masks[name]).sum() for name, x in metrics.items()}


def added(parts: list[Sums]) -> Sums:
    """Sums of several parts by name, added in their order."""
    total: Sums = {}
    for part in parts:
        for name, x in part.items():
            total[name] = total.get(name, 0.0) + x
    return total


def means_of(sums: Sums) -> dict[str, float]:
    """The means, by the counts of tokens that are among the sums."""
    counts = {name: kind(name) + TOKENS for name in sums}  # where each metric's tokens are counted
    return {name: float(sums[name]) / sums[count] for name, count in counts.items() if name != count}
