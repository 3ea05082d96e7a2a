"""Dynamic sampling (arXiv 2503.14476, eq. 11): groups with equal rewards are replaced by groups of other questions.

Works on rewards, those of the answers if they are paid (`Scored.signal`); knows no episodes.
"""

from collections.abc import Callable, Sequence

import torch

from r3lite.rl.advantages import all_equal

Rewards = list[list[float | None]]  # of the episodes of each group; None: the reward is missing


def has_variance(rewards: Sequence[float | None]) -> bool:
    """Says if the rewards of a group differ, missing ones left out. Without variance all advantages are 0."""
    present = torch.tensor([reward for reward in rewards if reward is not None])
    return len(present) > 1 and not all_equal(present)


def refill(
    first: Rewards,
    sample_groups: Callable[[int, int], Rewards],
    limit: int,
) -> tuple[set[int], dict[str, float]]:
    """Samples further groups until as many have variance as there are in `first`, in at most `limit` attempts.

    `sample_groups(attempt, count)` samples `count` groups of other questions, for attempt 1, 2, ..., and returns their
    rewards. Each attempt samples as many groups as are still missing, so that never more are kept than `first` has.
    Returns the indices of the groups with variance among all groups sampled, and metrics.
    """
    rewards = list(first)
    varied = _with_variance(rewards)
    attempts = 0
    while len(varied) < len(first) and attempts < limit:
        attempts += 1
        rewards += sample_groups(attempts, len(first) - len(varied))
        varied = _with_variance(rewards)
    metrics = {"refill/attempts": attempts, "refill/groups": len(rewards), "refill/kept": len(varied)}
    return varied, metrics


def _with_variance(rewards: Rewards) -> set[int]:
    return {group for group, group_rewards in enumerate(rewards) if has_variance(group_rewards)}
