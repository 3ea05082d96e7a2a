"""Dynamic sampling (arXiv 2503.14476, eq. 11): groups without variance are replaced by groups of other questions.

An episode's signal is the number by which episodes of a group are compared, see `EpisodeReward.signal`. A group has
variance if the signals of its episodes differ. This file tells which groups have variance; `assembly/rl_round.py`
replaces the others.
"""

from collections.abc import Sequence

import torch

from r3lite.rl.advantages import all_equal

Signals = list[list[float | None]]  # for each group, the signals of its episodes; None: the episode has no reward


def has_variance(signals: Sequence[float | None]) -> bool:
    """Returns whether the signals of a group differ; missing signals are ignored.

    This does not tell whether advantages are 0: they are computed from total rewards, which may differ in a group whose
    signals are equal.
    """
    present = torch.tensor([signal for signal in signals if signal is not None])
    return len(present) > 1 and not all_equal(present)


def groups_with_variance(signals: Signals) -> set[int]:
    """Returns the indices of the groups with variance."""
    return {index for index, group_signals in enumerate(signals) if has_variance(group_signals)}
