"""Dynamic sampling (arXiv 2503.14476, eq. 11): groups with equal rewards are replaced by groups of other questions.

Here is which groups these are; `assembly/rl_round.py` samples the others. Works on signals, the rewards of the answers
if they are paid (`EpisodeReward.signal`); knows no episodes.
"""

from collections.abc import Sequence

import torch

from r3lite.rl.advantages import all_equal

Signals = list[list[float | None]]  # of the episodes of each group; None: the reward is missing


def has_variance(signals: Sequence[float | None]) -> bool:
    """Returns whether the signals of a group differ, missing ones left out. Without variance all advantages are 0."""
    present = torch.tensor([signal for signal in signals if signal is not None])
    return len(present) > 1 and not all_equal(present)


def groups_with_variance(signals: Signals) -> set[int]:
    """Returns the numbers, from 0, of the groups whose signals differ."""
    return {group for group, group_signals in enumerate(signals) if has_variance(group_signals)}
