"""How far the trainer's probabilities are from those that the sampler recorded. Pure functions over tensors."""

import torch
from torch import Tensor


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
