"""Dynamic sampling: which groups are replaced, how often, and what is kept."""

import pytest

from r3lite.rl.refill import has_variance, refill


class Source:
    """Hands out prepared groups and notes what it was asked for."""

    def __init__(self, *groups: list):
        self.groups, self.asked = list(groups), []

    def __call__(self, attempt: int, groups: int) -> list:
        self.asked.append((attempt, groups))
        given, self.groups = self.groups[:groups], self.groups[groups:]
        return given


def test_groups_without_variance_are_replaced_until_there_are_as_many():
    """Two of three groups teach nothing; of the two that replace them one does not either; the next one does."""
    more = Source([1, 1], [0, 1], [0.5, 0])
    kept, told = refill([[1, 1], [0, 1, 1], [0, 0]], more, limit=5)  # a group may have grown
    assert more.asked == [(1, 2), (2, 1)] and kept == {1, 4, 5}
    assert told == {"refill/attempts": 2, "refill/groups": 6, "refill/kept": 3}


def test_the_limit_holds_and_what_there_is_is_kept():
    more = Source(*([1, 1] for _ in range(4)))
    kept, told = refill([[0, 0], [0, 1]], more, limit=3)
    assert more.asked == [(1, 1), (2, 1), (3, 1)] and kept == {1}
    assert told == {"refill/attempts": 3, "refill/groups": 5, "refill/kept": 1}


def test_where_all_differ_nothing_more_is_sampled():
    more = Source()
    kept, told = refill([[0, 1], [1, 0]], more, limit=3)
    assert more.asked == [] and kept == {0, 1} and told["refill/groups"] == 2


@pytest.mark.parametrize(
    ("rewards", "differ"),
    [([0.0, 1.0], True), ([1.0, 1.0, 1.0], False), ([1.0, None], False), ([1.0, None, 0.5], True), ([None], False)],
)
def test_missing_rewards_are_left_out(rewards, differ):
    assert has_variance(rewards) == differ


def test_rounding_is_no_difference():
    assert not has_variance([0.1 + 0.2, 0.3])
