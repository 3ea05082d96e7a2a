"""Advantages: how much better an action was than expected. Pure functions over tensors.

Shapes: [B, T] rows and positions, [B] one number for each episode. `groups` [B] has the number of each episode's group:
the episodes of one draw of a question are a group.
"""

from collections.abc import Callable

import torch
from torch import Tensor

EPSILON = 1e-4  # added to the standard deviation of a group in GRPO, as in TRL


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Returns the mean [] of x where the mask is True; 0 if it is True nowhere. Both have the same shape."""
    return (x * mask).sum() / mask.sum().clamp(min=1)


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Returns x [B, T], shifted and scaled to mean 0 and variance 1 where the mask [B, T] is True, and 0 elsewhere.

    If all numbers are equal, all become exactly 0. `_by_group` tells why.
    """
    if all_equal(x[mask]):
        return torch.zeros_like(x)
    mean = masked_mean(x, mask)
    variance = masked_mean((x - mean) ** 2, mask)
    return (x - mean) * torch.rsqrt(variance + 1e-8) * mask


def gae(
    rewards: Tensor,
    values: Tensor,
    action_mask: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (arXiv 1506.02438, eq. 16) over action tokens only.

        delta_t = r_t + gamma V_t' - V_t,    A_t = delta_t + gamma lambda A_t'

    where t' is the next action token after t; after the last action token, V and A are 0. All other tokens, such as
    those of documents, are skipped, because they have no value. If they counted, with the value 0, the last action of a
    step would look as if no reward could follow it.

    Takes rewards, values and the mask [B, T]. Returns advantages, and the critic's targets (advantage + value), both
    [B, T] and 0 where the mask is False.
    """
    advantages = torch.zeros_like(values)
    next_value = torch.zeros_like(values[:, 0])  # [B]
    next_advantage = torch.zeros_like(values[:, 0])  # [B]
    for t in range(values.shape[1] - 1, -1, -1):
        is_action = action_mask[:, t]  # [B]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_value = torch.where(is_action, values[:, t], next_value)
        next_advantage = torch.where(is_action, advantage, next_advantage)
        advantages[:, t] = torch.where(is_action, advantage, 0.0)
    targets = (advantages + values) * action_mask
    return advantages, targets


def group_normalized(returns: Tensor, groups: Tensor) -> Tensor:
    """GRPO's advantages [B] (arXiv 2402.03300): (R - mean) / (std + EPSILON) within a group of returns R.

    std is the sample standard deviation, as in TRL.
    """

    def advantage(r: Tensor) -> Tensor:
        return (r - r.mean()) / (r.std() + EPSILON)

    return _by_group(returns, groups, advantage)


def group_centered(returns: Tensor, groups: Tensor) -> Tensor:
    """Dr. GRPO's advantages [B] (arXiv 2503.20783): R - mean within a group of returns R."""

    def advantage(r: Tensor) -> Tensor:
        return r - r.mean()

    return _by_group(returns, groups, advantage)


def leave_one_out(returns: Tensor, groups: Tensor) -> Tensor:
    """RLOO's advantages [B] (arXiv 2402.14740): R - mean of the other returns of the group."""

    def advantage(r: Tensor) -> Tensor:
        mean_of_others = (r.sum() - r) / (len(r) - 1)
        return r - mean_of_others

    return _by_group(returns, groups, advantage)


def _by_group(returns: Tensor, groups: Tensor, advantage: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns the advantages [B]. `advantage` computes those of one group from its returns, both [size of the group].

    A group whose returns are all equal, such as a group of one, gets exactly 0 instead of the rounding error of
    r - mean: AdamW divides gradients by their own size, so that even a tiny gradient makes a full step.
    """
    advantages = torch.zeros_like(returns)
    for group in groups.unique():
        in_group = groups == group
        group_returns = returns[in_group]
        if not all_equal(group_returns):
            advantages[in_group] = advantage(group_returns)
    return advantages


def share_without_variance(numbers: Tensor, groups: Tensor) -> float:
    """Returns the share of the groups whose numbers are all equal, for numbers and groups [B]."""
    group_ids = groups.unique()
    without_variance = sum(all_equal(numbers[groups == group]) for group in group_ids)
    return without_variance / len(group_ids)


def all_equal(numbers: Tensor) -> bool:
    """Returns whether numbers are equal up to the rounding of fp32 sums, which depends on the order of the addends."""
    return bool(numbers.max() - numbers.min() < rounding(numbers))


def rounding(numbers: Tensor) -> float:
    """Returns the least difference of numbers that is more than the rounding of fp32 sums.

    It is 1e-6 times the largest magnitude, but at least 1e-6: a sum near 0 may have addends near 1.
    """
    return 1e-6 * max(1.0, numbers.abs().max().item())
