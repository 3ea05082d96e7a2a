"""Grounded expansion (arXiv 2601.21699): a failed episode gets a second end, behind a step that found gold paragraphs.

This file tells which episodes and which steps; `assembly/rl_round.py` samples the new ends.
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass


@dataclass(frozen=True)
class NearMiss:
    """A failed episode with a useful step. A useful step retrieved a gold paragraph that no earlier step had."""

    index: int  # index of the episode in its round
    group: int
    gold_count: int  # number of gold paragraphs that its steps retrieved
    last_useful_step: int  # number of its last useful step, from 1


@dataclass(frozen=True)
class Expansion:
    """A new episode that begins with the first steps of an earlier one of its round, its origin."""

    origin: int  # index of the earlier episode
    steps: int  # number of steps that both have


def choose_expansions(near_misses: Iterable[NearMiss], varied_groups: Set[int]) -> list[Expansion]:
    """Returns an expansion of each near miss of a round, best first. It keeps all steps up to the last useful one.

    Near misses of groups without variance come first, then those of `varied_groups`. Within each of the two, groups
    take turns: first comes the best near miss of each group, then the second best of each, and so on. The best one of a
    group has the most gold paragraphs; of equal ones, the first.
    """
    by_group: dict[int, list[NearMiss]] = {}
    for near_miss in near_misses:
        by_group.setdefault(near_miss.group, []).append(near_miss)
    ranked = []
    for group, candidates in by_group.items():
        best_first = sorted(candidates, key=lambda near_miss: -near_miss.gold_count)
        for rank, near_miss in enumerate(best_first):
            # False sorts before True: groups without variance come first.
            ranked.append((group in varied_groups, rank, near_miss.index, near_miss.last_useful_step))
    return [Expansion(origin=index, steps=steps) for _, _, index, steps in sorted(ranked)]
