"""Dynamic sampling (arXiv 2503.14476, eq. 11): groups with equal rewards are replaced by groups of other questions.

Works on rewards, those of the answers if they are paid (`Scored.signal`); knows no episodes.
"""

from collections.abc import Callable, Sequence

import torch

from r3lite.rl.advantages import all_equal

Rewards = list[list[float | None]]  # of the episodes of each group; None: the reward is missing


def has_variance(rewards: Sequence[float | None]) -> bool:
    """Whether the rewards of a group differ, missing ones left out. Without variance all advantages are 0."""
    known = torch.tensor([r for r in rewards if r is not None])
    return len(known) > 1 and not all_equal(known)


def refill(first: Rewards, more: Callable[[int, int], Rewards], limit: int) -> tuple[set[int], dict[str, float]]:
    """Samples further groups until as many have variance as there are in `first`, in at most `limit` attempts.

    `more(attempt, count)` samples `count` groups of other questions, for attempt 1, 2, ..., and returns their rewards.
    Each attempt samples as many groups as are still missing, so that never more are kept than `first` has. Returns the
    indices of the groups with variance among all groups sampled, and metrics.
    """
    rewards, attempts = list(first), 0

    def kept() -> set[int]:
        return {i for i, group in enumerate(rewards) if has_variance(group)}

    while (missing := len(first) - len(learned := kept())) and attempts < limit:
        attempts += 1
        rewards += more(attempts, missing)
    return learned, {"refill/attempts": attempts, "refill/groups": len(rewards), "refill/kept": len(learned)}
