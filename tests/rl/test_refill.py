"""Dynamic sampling: which groups have variance."""

import pytest

from r3lite.rl.refill import groups_with_variance, has_variance


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
