"""Advantages: how much better an action was than expected. Pure functions over tensors."""

from collections.abc import Callable

import torch
from torch import Tensor


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x over the mask, which has the shape of x."""
    return (x * mask).sum() / mask.sum().clamp(min=1)


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """x [B, T] with mean 0 and variance 1 over the mask; 0 elsewhere."""
    mean = masked_mean(x, mask)
    variance = masked_mean((x - mean) ** 2, mask)
    return (x - mean) * torch.rsqrt(variance + 1e-8) * mask


def gae(rewards: Tensor, values: Tensor, action_mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (arXiv 1506.02438, eq. 16) over action tokens only.

    delta_t = r_t + gamma V_t' - V_t and A_t = delta_t + gamma lambda A_t', with t' the next *action* token after t
    (V and A are 0 past the last one). Observations are skipped: with their V = 0, the last action of a step would look
    as if no reward could follow it. Takes rewards, values and the mask [B, T]; returns advantages, and the critic's
    targets (advantage + value), both [B, T] and 0 at observations.
    """
    advantages = torch.zeros_like(values)
    next_value = next_advantage = torch.zeros_like(values[:, 0])  # [B]
    for t in range(values.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_value = torch.where(action_mask[:, t], values[:, t], next_value)
        next_advantage = torch.where(action_mask[:, t], advantage, next_advantage)
        advantages[:, t] = torch.where(action_mask[:, t], advantage, 0.0)
    return advantages, (advantages + values) * action_mask


def group_normalized(returns: Tensor, groups: Tensor, eps: float = 1e-4) -> Tensor:
    """GRPO's advantage (arXiv 2402.03300): (R - mean) / (std + eps) within a group, for returns and groups [B].

    std is the sample standard deviation, as in TRL.
    """
    return _by_group(returns, groups, lambda r: (r - r.mean()) / (r.std() + eps))


def group_centered(returns: Tensor, groups: Tensor) -> Tensor:
    """Dr. GRPO's advantage (arXiv 2503.20783): R - mean within a group, for returns and groups [B]."""
    return _by_group(returns, groups, lambda r: r - r.mean())


def leave_one_out(returns: Tensor, groups: Tensor) -> Tensor:
    """RLOO's advantage (arXiv 2402.14740): R - mean of the others of the group, for returns and groups [B]."""
    return _by_group(returns, groups, lambda r: r - (r.sum() - r) / (len(r) - 1))


def _by_group(returns: Tensor, groups: Tensor, advantage: Callable[[Tensor], Tensor]) -> Tensor:
    """The advantages [B] that `advantage` computes from the returns of each group.

    A group whose returns are all equal, such as a group of one, gets exactly 0: AdamW would turn the gradient of a
    rounding error in r - mean into full steps.
    """
    advantages = torch.zeros_like(returns)
    for group in groups.unique():
        mine = groups == group
        r = returns[mine]
        if not all_equal(r):
            advantages[mine] = advantage(r)
    return advantages


def share_without_variance(returns: Tensor, groups: Tensor) -> float:
    """Share of the groups whose returns are all equal, for returns and groups [B]."""
    kinds = groups.unique()
    return sum(all_equal(returns[groups == g]) for g in kinds) / len(kinds)


def all_equal(returns: Tensor) -> bool:
    """Whether returns are equal, up to the rounding of sums taken in another order."""
    return bool(returns.max() - returns.min() < 1e-6)
