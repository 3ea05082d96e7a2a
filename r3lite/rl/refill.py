"""Dynamic sampling (arXiv 2503.14476, eq. 11): groups that teach nothing are replaced by groups of other questions.

Works on rewards; what an episode is, only the caller knows.
"""

from collections.abc import Callable, Sequence

import torch

from r3lite.rl.advantages import all_equal

Rewards = list[list[float | None]]  # of each group's episodes; None: it is missing


def teaches(rewards: Sequence[float | None]) -> bool:
    """Whether a group's rewards differ; those that are missing are left out."""
    known = torch.tensor([r for r in rewards if r is not None])
    return len(known) > 1 and not all_equal(known)


def refill(first: Rewards, more: Callable[[int, int], Rewards], limit: int) -> tuple[set[int], dict[str, float]]:
    """Samples until as many groups teach as there are in `first`, at most `limit` times.

    `more(attempt, groups)` samples `groups` groups of other questions, for attempt 1, 2, ..., and returns their
    rewards. Each attempt replaces what is still missing, so no more groups are kept than there were. Returns the groups
    that are learned from, by their place among all that were sampled, and metrics.
    """
    rewards, attempts = list(first), 0

    def kept() -> set[int]:
        return {i for i, group in enumerate(rewards) if teaches(group)}

    while (missing := len(first) - len(learned := kept())) and attempts < limit:
        attempts += 1
        rewards += more(attempts, missing)
    return learned, {"refill/attempts": attempts, "refill/groups": len(rewards), "refill/kept": len(learned)}
