"""Normalizers: the weight of each token in the loss of a mini-batch, which is sum(weight * loss).

Each takes the mask [B, T] of the tokens that have a loss and returns their weights [B, T], 0 elsewhere. They differ in
what counts alike: each token, or each episode whatever its length.
"""

from torch import Tensor


def token_mean(mask: Tensor) -> Tensor:
    """The mean over all tokens: a long episode counts more than a short one."""
    return mask / mask.sum().clamp(min=1)


def episode_mean(mask: Tensor) -> Tensor:
    """The mean over each episode's tokens, then over the episodes: a token of a long episode counts less."""
    return mask / (mask.sum(-1, keepdim=True).clamp(min=1) * len(mask))


def episode_sum(mask: Tensor, constant: int = 1) -> Tensor:
    """The sum over each episode's tokens, divided by a constant, then the mean over the episodes."""
    return mask / (constant * len(mask))
