"""Dynamic sampling: which groups have variance."""

from dataclasses import replace

import pytest

from r3lite.core.token_record import TokenRecord
from r3lite.rl.algorithms.grpo import Grpo
from r3lite.rl.batch import Batch, Rollout
from r3lite.rl.refill import groups_with_variance, has_variance
from r3lite.settings import LengthSettings, RLSettings


def test_groups_with_equal_signals_are_those_without_variance():
    assert groups_with_variance([[1, 1], [0, 1, 1], [0, 0], [0.5, 0]]) == {1, 3}  # a group may have grown
    assert groups_with_variance([]) == set()


@pytest.mark.parametrize(
    ("rewards", "differ"),
    [([0.0, 1.0], True), ([1.0, 1.0, 1.0], False), ([1.0, None], False), ([1.0, None, 0.5], True), ([None], False)],
)
def test_missing_rewards_are_left_out(rewards, differ):
    assert has_variance(rewards) == differ


def test_rounding_is_no_difference():
    assert not has_variance([0.1 + 0.2, 0.3])


def test_a_group_without_variance_may_have_advantages():
    """Equal signals were once said to mean advantages of 0; those come from the totals, here of two wrong answers."""
    record = TokenRecord(tokens=[5, 6], action_mask=[False, True])
    rollouts = [replace(Rollout.with_final_reward(record, total, group=0), signal=0.0) for total in (0.0, 0.2)]
    batch = Batch.of(rollouts)
    grpo = Grpo(RLSettings(algorithm="grpo"), LengthSettings())
    assert groups_with_variance([batch.signals.tolist()]) == set()
    assert grpo.statistics(batch) == {"frac_reward_zero_std": 1.0}
    # The mean is 0.1, the sample standard deviation the root of 2 times 0.1 squared.
    by_hand = 0.1 / (0.02**0.5 + 1e-4)
    assert grpo.with_advantages(batch).advantages[:, 1].tolist() == pytest.approx([-by_hand, by_hand])
