"""Grounded expansion (arXiv 2601.21699): a failed episode is sampled again after its last useful step.

A useful step is the first of its episode to retrieve some gold paragraph.

This file chooses the episodes and the steps; `assembly/rl_round.py` samples the new episodes.
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True)
class NearMiss:
    """A failed episode with a useful step, that is, a step that is the first to retrieve some gold paragraph."""

    index: int  # index of the episode in its round
    group: int  # number of its group
    gold_count: int  # number of gold paragraphs that its steps retrieved
    last_useful_step: int  # number of its last useful step, from 1


@dataclass(frozen=True)
class Expansion:
    """A new episode that begins with the first steps of another episode of its round, its origin."""

    origin: int  # index of the origin in the round
    steps: int  # number of steps that are taken over from the origin


def choose_expansions(near_misses: Iterable[NearMiss], varied_groups: Set[int]) -> list[Expansion]:
    """Returns an expansion of each near miss of a round, the most promising first.

    An expansion has the near miss's steps up to the last useful one. Near misses of groups without variance come first,
    then those of `varied_groups`. In each of these two parts, first comes the best near miss of each group, then the
    second best of each, and so on. The best near miss of a group is the one with the most gold paragraphs; of several
    with equally many, the first.
    """
    by_group: dict[int, list[NearMiss]] = {}
    for near_miss in near_misses:
        by_group.setdefault(near_miss.group, []).append(near_miss)
    ranks: dict[int, int] = {}  # by the index of a near miss, its rank in its group: 0 for the best
    for group_near_misses in by_group.values():
        best_first = sorted(group_near_misses, key=lambda near_miss: -near_miss.gold_count)
        for rank, near_miss in enumerate(best_first):
            ranks[near_miss.index] = rank

    def sort_key(near_miss: NearMiss) -> tuple[bool, int, int]:
        # False sorts before True: groups without variance come first.
        return near_miss.group in varied_groups, ranks[near_miss.index], near_miss.index

    ordered = sorted(chain.from_iterable(by_group.values()), key=sort_key)
    return [Expansion(origin=near_miss.index, steps=near_miss.last_useful_step) for near_miss in ordered]
