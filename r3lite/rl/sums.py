"""Metrics of a round: sums over tokens, chunk by chunk, and the means that they become; how far the trainer's
probabilities are from those that the sampler recorded. Pure functions over tensors.

There are three kinds of tokens, and a metric's name begins with the kind that it is of: OFF_POLICY are those that the
policy did not sample, GUIDED those that a teacher says something of. All other metrics are of the policy's own tokens
that learn from rewards, so that these mean the same for every algorithm.
"""

import torch
from torch import Tensor

Sums = dict[str, Tensor | int]
OFF_POLICY, GUIDED = "off_policy/", "teacher/"
TOKENS = "tokens"  # after the kind: how many tokens the sums are over


def summed(metrics: dict[str, Tensor], off_policy: Tensor | None = None) -> Sums:
    """Sums over the tokens that a metric is of, without gradients; `off_policy` says which these are, None: none."""
    if off_policy is None:
        return {name: x.detach().sum() for name, x in metrics.items()}
    masks = {name: off_policy if name.startswith(OFF_POLICY) else ~off_policy for name in metrics}
    return {name: (x.detach() * masks[name]).sum() for name, x in metrics.items()}


def added(parts: list[Sums]) -> Sums:
    """Sums of several parts by name, added in their order."""
    total: Sums = {}
    for part in parts:
        for name, x in part.items():
            total[name] = total.get(name, 0.0) + x
    return total


def means_of(sums: Sums) -> dict[str, float]:
    """The means, by the counts of tokens of each kind that are among the sums."""
    means = {}
    for name, total in sums.items():
        kind = next((prefix for prefix in (OFF_POLICY, GUIDED) if name.startswith(prefix)), "")
        if name != kind + TOKENS:
            means[name] = float(total) / sums[kind + TOKENS]
    return means


def sampling_metrics(log_ratios: list[Tensor], clip_low: float, clip_high: float) -> dict[str, float]:
    """Metrics of a round, from the log-ratios [2, N] of its first epoch's mini-batches: row 0 is log pi(now) - log
    pi(recorded) of each token, row 1 the logarithm of the ratio that the algorithm clips, which may be the same.

    The differences, under TRL's names, are |row 0| over the action tokens of the first mini-batch alone. Only its
    log-probabilities are computed before the round's first optimizer step, while trainer and sampler have the same
    weights and differ by rounding alone; its rows are drawn at random. The share of tokens whose ratio is outside the
    clip, whatever their advantages, is over the whole epoch: if it has more mini-batches, theirs hold what the round
    has learned before them too. Tokens without a ratio are in none of the tensors; what no token tells is left out.
    """
    difference, ratio = log_ratios[0][0].abs(), torch.cat(log_ratios, dim=1)[1].exp()
    outside = (ratio < 1 - clip_low) | (ratio > 1 + clip_high)
    found = {}
    if len(difference):
        found["sampling/sampling_logp_difference/mean"] = float(difference.mean())
        found["sampling/sampling_logp_difference/max"] = float(difference.max())
    if len(outside):
        found["sampling/outside_clip_first_epoch"] = float(outside.float().mean())
    return found
