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


def tokens(replay: ReplayBuffer, question: str) -> list[int]:
    return [int(success.record.tokens[1]) for success in replay.questions[question].successes]


def test_successes_are_kept_with_the_rate_of_the_newest_group():
    replay = buffer()
    replay.add(1, {"a": group(True, False, True, False), "b": group(False, False, False, False), "c": []})
    assert list(replay.questions) == ["a"] and tokens(replay, "a") == [1, 3] and replay.questions["a"].rate == 0.5
    replay.add(2, {"a": group(True, False, False, False, token=5)})
    assert tokens(replay, "a") == [1, 3, 5] and replay.questions["a"].rate == 0.25
    replay.add(3, {"a": group(False, False, False, False)})  # it was solved once: its successes are what is rare
    assert tokens(replay, "a") == [1, 3, 5] and replay.questions["a"].rate == 0.0
    assert [success.round for success in replay.questions["a"].successes] == [1, 1, 2]
    replay.add(4, {"a": group(True, True, False, False, token=8)})  # no more than a group has
    assert tokens(replay, "a") == [3, 5, 8, 9]


def test_a_question_that_all_of_a_group_solve_is_retired_for_good():
    replay = buffer()
    replay.add(1, {"a": group(True, False, True, False), "b": group(True, True, True, False)})
    replay.add(2, {"a": group(True, True, True, True)})
    assert list(replay.questions) == ["b"] and replay.retired == {"a"}
    replay.add(3, {"a": group(True, False, True, False)})
    assert list(replay.questions) == ["b"]
    assert replay.metrics() == {"replay/size": 3, "replay/questions": 1, "replay/retired": 1}
    replay.add(4, {"c": group(True, True)})  # the judge failed on the others: that is not all of a group
    assert "c" in replay.questions and replay.questions["c"].rate == 1.0


def test_the_oldest_make_room():
    replay = buffer(size=3)
    replay.add(1, {"a": group(True, True, False, False), "b": group(True, False, False, False, token=5)})
    replay.add(2, {"c": group(True, True, False, False, token=8)})
    assert replay.count == 3 and list(replay.questions) == ["b", "c"] and tokens(replay, "c") == [8, 9]
    replay.add(3, {"b": group(True, True, True, False, token=20)})
    assert {name: tokens(replay, name) for name in replay.questions} == {"b": [20, 21, 22]}


def test_questions_are_chosen_by_the_gaussian_over_rates():
    """Ten of rate 0 and one of 1/2: weights exp(-1/8) and 1, however many have a rate; each at most once."""
    replay = buffer()
    replay.add(
        1, {f"q{i}": group(True, False, False, False) for i in range(10)} | {"m": group(True, True, False, False)}
    )
    replay.add(2, {f"q{i}": group(False, False, False, False) for i in range(10)})
    first = Counter(replay.choose(1, str(seed))[0] for seed in range(10_000))
    share = 1 / (1 + math.exp(-1 / 8))  # 0.531; without the weights 0.5
    assert first["m"] / 10_000 == pytest.approx(share, abs=0.015)
    assert sorted(replay.choose(20, "x")) == sorted(replay.questions) and replay.choose(20, "x") == replay.choose(
        20, "x"
    )
    assert len(set(replay.choose(5, "y"))) == 5


def test_nothing_is_replayed_before_a_round_is_good_enough():
    replay = buffer(start=0.5)
    replay.add(1, {"a": group(True, False, False, False)})
    assert replay.choose(1, "x") == [] and replay.count == 1
    replay.add(2, {"b": group(True, True, False, False)})
    assert len(replay.choose(2, "x")) == 2
    replay.add(3, {"b": group(False, False, False, False)})
    assert len(replay.choose(2, "x")) == 2  # once begun, it goes on
    assert buffer(start=0.0).choose(1, "x") == []


def test_the_success_of_lowest_entropy_is_taken():
    replay = buffer()
    replay.add(1, {"a": group(True, True, True, False), "b": group(False, False, False, True, token=10)})
    batches = []

    def entropies(batch):
        batches.append(batch.tokens[:, 1].tolist())
        return torch.tensor([0.3, 0.1, 0.2, 0.9])

    successes = replay.of_lowest_entropy(["a", "b"], entropies)
    assert batches == [[1, 2, 3, 13]] and [int(s.record.tokens[1]) for s in successes.values()] == [2, 13]
    assert replay.of_lowest_entropy([], entropies) == {} and len(batches) == 1
    replayed = successes["a"].rollout(5)
    assert (replayed.record.tokens, replayed.record.action_mask, replayed.group, replayed.off_policy) == (
        [7, 2, 8],
        [False, True, False],
        5,
        True,
    )
    assert replayed.signal is None
    assert replayed.token_rewards == [(1, 1.0)] and replayed.record.logprobs == pytest.approx([-0.2])
    assert (
        torch.tensor(replayed.record.logprobs).tolist() == torch.tensor([-0.1 * 2]).tolist()
    )  # as the batch had it, to the bit


def through_files(state: dict) -> dict:
    return json.loads(json.dumps({k: v for k, v in state.items() if k != "tensors"})) | {"tensors": state["tensors"]}


def test_its_state_is_all_of_it():
    replay = buffer(size=5)
    restored = buffer(size=5)
    replay.add(1, {"b": group(True, False, True, False), "a": group(True, True, False, False)})
    replay.add(2, {"c": group(True, True, True, True)})
    restored.load_state_dict(through_files(replay.state_dict()))
    for one in (replay, restored):
        one.add(3, {"d": group(True, True, False, False), "a": group(True, False, False, False, token=30)})
    assert list(replay.questions) == list(restored.questions) and replay.retired == restored.retired == {"c"}
    assert [replay.choose(2, str(i)) for i in range(20)] == [restored.choose(2, str(i)) for i in range(20)]
    state = replay.state_dict()
    restored_state = restored.state_dict()
    tensors = state.pop("tensors")
    restored_tensors = restored_state.pop("tensors")
    assert state == restored_state and tensors.keys() == restored_tensors.keys()
    assert all(
        torch.equal(tensor, restored_tensors[name]) and tensor.dtype == restored_tensors[name].dtype
        for name, tensor in tensors.items()
    )


def test_a_success_keeps_its_signal_in_checkpoints_too():
    replay = buffer()
    restored = buffer()
    older = buffer()
    rollouts = [(replace(rollout, signal=0.7), succeeded) for rollout, succeeded in group(True, False, False, False)]
    replay.add(1, {"a": rollouts})
    state = through_files(replay.state_dict())
    restored.load_state_dict(state)
    assert restored.questions["a"].successes[0].rollout(0).signal == 0.7
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
    saved = buffer()
    saved.add(1, {"a": group(True, False, False, False), "b": group(True, True, True, True)})
    state = through_files(saved.state_dict())
    damage(state)
    replay = buffer()
    replay.add(1, {"c": group(True, False, False, False, token=5)})
    with pytest.raises(R3LiteError, match="replay buffer"):
        replay.load_state_dict(state)
    assert list(replay.questions) == ["c"] and tokens(replay, "c") == [5] and replay.retired == set()


def test_a_question_that_was_drawn_twice_is_retired_if_all_its_episodes_succeeded():
    """4 successes of 8 episodes, as many as one group has, retired it."""
    replay = buffer()
    half_solved, all_solved = (group(*[True] * 4, *[succeeded] * 4) for succeeded in (False, True))
    replay.add(1, {"half": half_solved, "whole": all_solved, "few": group(True, True)}, {"half": 2, "whole": 2})
    assert replay.retired == {"whole"} and replay.questions["half"].rate == 0.5
    assert replay.questions["few"].rate == 1.0 and len(tokens(replay, "half")) == 4


def test_a_question_that_was_drawn_twice_is_not_retired_while_rewards_are_missing():
    """The rewards of one group were enough, although as many episodes had none."""
    replay = buffer()
    draws = {"missing": 2, "all": 2}
    replay.add(1, {"missing": group(*[True] * 7), "all": group(*[True] * 8), "once": group(*[True] * 4)}, draws)
    assert replay.retired == {"all", "once"} and replay.questions["missing"].rate == 1.0
