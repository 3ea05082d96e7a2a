"""Dynamic sampling (arXiv 2503.14476, eq. 11): groups with equal signals are replaced by groups of other questions.

This file tells which groups are replaced; `assembly/rl_round.py` samples the new ones. It works on signals, one number
for each episode (see `EpisodeReward.signal`), and knows no episodes.
"""

from collections.abc import Sequence

import torch

from r3lite.rl.advantages import all_equal

Signals = list[list[float | None]]  # for each group, the signals of its episodes; None: the reward is missing


def has_variance(signals: Sequence[float | None]) -> bool:
    """Returns whether the signals of a group differ, missing ones left out.

    Advantages, which come from the totals, may be other than 0 in a group whose signals are equal.
    """
    present = torch.tensor([signal for signal in signals if signal is not None])
    return len(present) > 1 and not all_equal(present)


def groups_with_variance(signals: Signals) -> set[int]:
    """Returns the indices of the groups whose signals differ."""
    return {group for group, group_signals in enumerate(signals) if has_variance(group_signals)}
