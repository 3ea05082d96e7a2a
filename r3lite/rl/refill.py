"""Dynamic sampling (arXiv 2503.14476, eq. 11): groups that teach nothing are replaced by groups of other questions.

Works on rewards; what an episode is, only the caller knows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from r3lite.rl.advantages import all_equal

T = TypeVar("T")
Paid = tuple[T, float | None]  # an episode and its reward; None: it is missing


@dataclass(frozen=True)
class Refilled(Generic[T]):
    """All episodes of a round, group after group, and which of the groups are learned from."""

    episodes: list[T]
    kept: set[int]  # groups, by their place among all that were sampled
    metrics: dict[str, float]


def teaches(rewards: Sequence[float | None]) -> bool:
    """Whether a group's rewards differ; those that are missing are left out."""
    known = torch.tensor([r for r in rewards if r is not None])
    return len(known) > 1 and not all_equal(known)


def refill(
    first: list[Paid[T]], more: Callable[[int, int], list[Paid[T]]], generations: int, limit: int
) -> Refilled[T]:
    """Samples until as many groups teach as there are in `first`, at most `limit` times.

    `more(attempt, groups)` samples so many groups of other questions, for attempt 1, 2, ... Each attempt replaces what
    is still missing, so no more groups are kept than there were.
    """
    assert len(first) % generations == 0
    wanted, sampled, attempts = len(first) // generations, list(first), 0

    def kept() -> set[int]:
        groups = [sampled[start : start + generations] for start in range(0, len(sampled), generations)]
        return {i for i, group in enumerate(groups) if teaches([reward for _, reward in group])}

    while (missing := wanted - len(learned := kept())) and attempts < limit:
        attempts += 1
        sampled += more(attempts, missing)
    told = {"refill/attempts": attempts, "refill/groups": len(sampled) // generations, "refill/kept": len(learned)}
    return Refilled([episode for episode, _ in sampled], learned, told)
