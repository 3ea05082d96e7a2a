import dataclasses

import pytest
import torch

from r3lite.core.token_record import TokenRecord
from r3lite.rl.batch import ActionTokens, Batch, Rollout


def rollout(tokens, action, rewards=(), group=0):
    return Rollout(
        TokenRecord(tokens=tokens, action_mask=action, logprobs=[-0.5] * sum(action), values=[0.25] * sum(action)),
        list(rewards),
        group,
    )


def test_padding_is_no_action_whatever_the_padding_id():
    """A padding id that is also a real token must not be taken for padding: the mask is made with the tokens."""
    batch = Batch.of([rollout([7, 0, 0], [False, True, True]), rollout([7, 0], [False, True])])
    assert batch.action_mask.tolist() == [[False, True, True], [False, True, False]]
    assert batch.tokens.tolist() == [[7, 0, 0], [7, 0, 0]]
    assert batch.token_rows() == [[7, 0, 0], [7, 0]]


def test_rewards_stand_where_they_were_paid():
    batch = Batch.of([rollout([1, 2, 3, 4], [False, True, False, True], [(1, 0.5), (3, 1.0), (3, 0.25)])])
    assert batch.rewards[0].tolist() == [0.0, 0.5, 0.0, 1.25]
    with pytest.raises(AssertionError, match="a reward belongs to an action token"):
        Batch.of([rollout([1, 2], [False, True], [(0, 1.0)])])


def test_rows_take_along_all_that_is_known():
    batch = Batch.of([rollout([1, 2, 3], [False, True, True]), rollout([4, 5], [False, True])])
    annotated = dataclasses.replace(batch, advantages=torch.tensor([[0.0, 1.0, 2.0], [0.0, 3.0, 0.0]]))
    assert annotated.select([1]).advantages.tolist() == [[0.0, 3.0, 0.0]] and annotated.select([1]).reference is None
    assert torch.equal(annotated.spread(annotated.advantages[annotated.action_mask]), annotated.advantages)
    tokens = ActionTokens.of(dataclasses.replace(annotated, weights=annotated.action_mask / 3), torch.device("cpu"))
    assert tokens.advantages.tolist() == [1.0, 2.0, 3.0] and tokens.reference is None
    assert tokens[1:].advantages.tolist() == [2.0, 3.0] and tokens[1:].old_logprobs.tolist() == [-0.5, -0.5]


def test_rows_are_read_up_to_their_last_action():
    """What follows the last action can teach nothing, and costs as much as what can."""
    short = rollout([1, 2, 3, 4], [False, True, False, False])
    long = rollout([5] * 90, [False] + [True] * 39 + [False] * 50, group=1)
    batch = Batch.of([short, long])
    assert [len(row) for row in batch.token_rows()] == [2, 40]
    part = batch.select([1, 0])
    assert part.token_rows() == [[5] * 40, [1, 2]] and part.groups.tolist() == [1, 0]
