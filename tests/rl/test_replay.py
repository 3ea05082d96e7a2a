"""The replay buffer: what is kept, chosen, retired and thrown out, and that a checkpoint holds all of it."""

import json
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from r3lite.core.errors import R3LiteError
from r3lite.core.token_record import TokenRecord
from r3lite.rl.batch import Rollout
from r3lite.rl.replay import ReplayBuffer


def rollout(token: int, reward: float = 1.0) -> Rollout:
    return Rollout(
        TokenRecord(tokens=[7, token, 8], action_mask=[False, True, False], logprobs=[-0.1 * token], values=[0.5]),
        [(1, reward / 2), (1, reward / 2)],
        0,
    )


def group(*successes: bool, token: int = 1) -> list[tuple[Rollout, bool]]:
    return [(rollout(token + i), success) for i, success in enumerate(successes)]


def buffer(size: int = 100, generations: int = 4, start: float = 0.0) -> ReplayBuffer:
    return ReplayBuffer(size, generations, start)


def tokens(made: ReplayBuffer, question: str) -> list[int]:
    return [int(success.record.tokens[1]) for success in made.questions[question].successes]


def test_successes_are_kept_with_the_rate_of_the_newest_group():
    made = buffer()
    made.add(1, {"a": group(True, False, True, False), "b": group(False, False, False, False), "c": []})
    assert list(made.questions) == ["a"] and tokens(made, "a") == [1, 3] and made.questions["a"].rate == 0.5
    made.add(2, {"a": group(True, False, False, False, token=5)})
    assert tokens(made, "a") == [1, 3, 5] and made.questions["a"].rate == 0.25
    made.add(3, {"a": group(False, False, False, False)})  # it was solved once: its successes are what is rare
    assert tokens(made, "a") == [1, 3, 5] and made.questions["a"].rate == 0.0
    assert [success.round for success in made.questions["a"].successes] == [1, 1, 2]
    made.add(4, {"a": group(True, True, False, False, token=8)})  # no more than a group has
    assert tokens(made, "a") == [3, 5, 8, 9]


def test_a_question_that_all_of_a_group_solve_is_retired_for_good():
    made = buffer()
    made.add(1, {"a": group(True, False, True, False), "b": group(True, True, True, False)})
    made.add(2, {"a": group(True, True, True, True)})
    assert list(made.questions) == ["b"] and made.retired == {"a"}
    made.add(3, {"a": group(True, False, True, False)})
    assert list(made.questions) == ["b"]
    assert made.metrics() == {"replay/size": 3, "replay/questions": 1, "replay/retired": 1}
    made.add(4, {"c": group(True, True)})  # the judge failed on the others: that is not all of a group
    assert "c" in made.questions and made.questions["c"].rate == 1.0


def test_the_oldest_make_room():
    made = buffer(size=3)
    made.add(1, {"a": group(True, True, False, False), "b": group(True, False, False, False, token=5)})
    made.add(2, {"c": group(True, True, False, False, token=8)})
    assert made.count == 3 and list(made.questions) == ["b", "c"] and tokens(made, "c") == [8, 9]
    made.add(3, {"b": group(True, True, True, False, token=20)})
    assert {name: tokens(made, name) for name in made.questions} == {"b": [20, 21, 22]}


def test_questions_are_chosen_by_the_gaussian_over_rates():
    """Ten of rate 1/4 and one of 1/2: weights exp(-1/32) and 1, however many have a rate; each at most once."""
    made = buffer()
    made.add(1, {f"q{i}": group(True, False, False, False) for i in range(10)} | {"m": group(True, True, False, False)})
    first = Counter(made.choose(1, str(seed))[0] for seed in range(4000))
    share = 1 / (1 + math.exp(-1 / 32))
    assert first["m"] / 4000 == pytest.approx(share, abs=0.03)
    assert sorted(made.choose(20, "x")) == sorted(made.questions) and made.choose(20, "x") == made.choose(20, "x")
    assert len(set(made.choose(5, "y"))) == 5


def test_nothing_is_replayed_before_a_round_is_good_enough():
    made = buffer(start=0.5)
    made.add(1, {"a": group(True, False, False, False)})
    assert made.choose(1, "x") == [] and made.count == 1
    made.add(2, {"b": group(True, True, False, False)})
    assert len(made.choose(2, "x")) == 2
    made.add(3, {"b": group(False, False, False, False)})
    assert len(made.choose(2, "x")) == 2  # once begun, it goes on
    assert buffer(start=0.0).choose(1, "x") == []


def test_the_success_of_lowest_entropy_is_taken():
    made = buffer()
    made.add(1, {"a": group(True, True, True, False), "b": group(False, False, False, True, token=10)})
    seen = []

    def entropies(batch):
        seen.append(batch.tokens[:, 1].tolist())
        return torch.tensor([0.3, 0.1, 0.2, 0.9])

    found = made.of_lowest_entropy(["a", "b"], entropies)
    assert seen == [[1, 2, 3, 13]] and [int(s.record.tokens[1]) for s in found.values()] == [2, 13]
    assert made.of_lowest_entropy([], entropies) == {} and len(seen) == 1
    again = found["a"].rollout(5)
    assert (again.record.tokens, again.record.action_mask, again.group, again.off_policy) == (
        [7, 2, 8],
        [False, True, False],
        5,
        True,
    )
    assert again.signal is None
    assert again.token_rewards == [(1, 1.0)] and again.record.logprobs == pytest.approx([-0.2])
    assert (
        torch.tensor(again.record.logprobs).tolist() == torch.tensor([-0.1 * 2]).tolist()
    )  # as the batch had it, to the bit


def through_files(state: dict) -> dict:
    return json.loads(json.dumps({k: v for k, v in state.items() if k != "tensors"})) | {"tensors": state["tensors"]}


def test_its_state_is_all_of_it():
    made, again = buffer(size=5), buffer(size=5)
    made.add(1, {"b": group(True, False, True, False), "a": group(True, True, False, False)})
    made.add(2, {"c": group(True, True, True, True)})
    again.load_state_dict(through_files(made.state_dict()))
    for one in (made, again):
        one.add(3, {"d": group(True, True, False, False), "a": group(True, False, False, False, token=30)})
    assert list(made.questions) == list(again.questions) and made.retired == again.retired == {"c"}
    assert [made.choose(2, str(i)) for i in range(20)] == [again.choose(2, str(i)) for i in range(20)]
    one, other = made.state_dict(), again.state_dict()
    tensors, more = one.pop("tensors"), other.pop("tensors")
    assert one == other and tensors.keys() == more.keys()
    assert all(torch.equal(tensor, more[name]) and tensor.dtype == more[name].dtype for name, tensor in tensors.items())


def test_a_success_keeps_its_signal_in_checkpoints_too():
    made, again, older = buffer(), buffer(), buffer()
    rollouts = [(replace(rollout, signal=0.7), succeeded) for rollout, succeeded in group(True, False, False, False)]
    made.add(1, {"a": rollouts})
    state = through_files(made.state_dict())
    again.load_state_dict(state)
    assert again.questions["a"].successes[0].rollout(0).signal == 0.7
    del state["questions"][0]["successes"][0]["signal"]  # as earlier versions wrote it
    older.load_state_dict(state)
    assert older.questions["a"].successes[0].rollout(0).signal is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s["tensors"].pop("0.0.logprobs"),
        lambda s: s["questions"][0].pop("rate"),
        lambda s: s.update(started="yes"),
        lambda s: s.pop("retired"),
    ],
)
def test_a_damaged_state_is_an_error_and_changes_nothing(damage):
    made = buffer()
    made.add(1, {"a": group(True, False, False, False)})
    state = through_files(made.state_dict())
    damage(state)
    with pytest.raises(R3LiteError, match="replay buffer"):
        made.load_state_dict(state)
    assert tokens(made, "a") == [1]


def test_a_question_that_was_drawn_twice_is_retired_if_all_its_episodes_succeeded():
    """4 successes of 8 episodes, as many as one group has, retired it."""
    made = buffer()
    half, whole = (group(*[True] * 4, *[succeeded] * 4) for succeeded in (False, True))
    made.add(1, {"half": half, "whole": whole, "few": group(True, True)}, {"half": 2, "whole": 2})
    assert made.retired == {"whole"} and made.questions["half"].rate == 0.5
    assert made.questions["few"].rate == 1.0 and len(tokens(made, "half")) == 4


def test_a_question_that_was_drawn_twice_is_not_retired_while_rewards_are_missing():
    """The rewards of one group were enough, although as many episodes had none."""
    made = buffer()
    draws = {"missing": 2, "all": 2}
    made.add(1, {"missing": group(*[True] * 7), "all": group(*[True] * 8), "once": group(*[True] * 4)}, draws)
    assert made.retired == {"all", "once"} and made.questions["missing"].rate == 1.0
