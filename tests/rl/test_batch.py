import pytest
import torch

from r3lite.rl.batch import Batch, Rollout


def rollout(tokens, action, rewards=(), group=0):
    return Rollout(tokens, action, [-0.5 * a for a in action], [0.25 * a for a in action], list(rewards), group)


def test_padding_is_no_action_whatever_the_padding_id():
    """A padding id that is also a real token must not be taken for padding: the mask is made with the tokens."""
    batch = Batch.of([rollout([7, 0, 0], [False, True, True]), rollout([7, 0], [False, True])], pad_id=0, device="cpu")
    assert batch.action[:, :3].tolist() == [[False, True, True], [False, True, False]]
    assert batch.tokens[:, :3].tolist() == [[7, 0, 0], [7, 0, 0]]
    assert batch.tokens.shape == (2, 32) and not batch.action[:, 3:].any()


def test_rewards_stand_where_they_were_paid():
    batch = Batch.of([rollout([1, 2, 3, 4], [False, True, False, True], [(1, 0.5), (3, 1.0), (3, 0.25)])], 0, "cpu")
    assert batch.rewards[0, :5].tolist() == [0.0, 0.5, 0.0, 1.25, 0.0]
    with pytest.raises(AssertionError):
        Batch.of([rollout([1, 2], [False, True], [(0, 1.0)])], 0, "cpu")


def test_rows_are_cut_to_the_last_action_of_the_longest():
    """What follows the last action can teach nothing, and costs as much as what can."""
    short = rollout([1, 2, 3, 4], [False, True, False, False])
    long = rollout([5] * 90, [False] + [True] * 39 + [False] * 50, group=1)
    batch = Batch.of([short, long], 0, "cpu")
    assert batch.lengths.tolist() == [2, 40] and batch.tokens.shape == (2, 96)
    part = batch.rows(torch.tensor([0]))
    assert part.tokens.shape == (1, 32) and part.tokens[0, :2].tolist() == [1, 2] and part.groups.tolist() == [0]
    assert batch.rows(torch.tensor([1, 0])).tokens.shape == (2, 64)
