"""Rounds as poor as can be: groups of one, equal rewards, episodes of one token. Nothing may become inf or nan."""

import random
from dataclasses import replace

import pytest
import torch

from r3lite.core.token_record import TokenRecord
from r3lite.rewards.registry import LARGEST_REWARD
from r3lite.rl.algorithms import ALGORITHMS
from r3lite.rl.batch import Batch, Rollout
from r3lite.settings import LengthSettings
from tests.rl.conftest import VOCABULARY, paper


def episode(dice: random.Random, paid: float, group: int, actions: int) -> Rollout:
    """Random tokens, of which `actions` were sampled; paid at the last of them."""
    mask = [False] + [True] * actions + [False] * dice.choice([0, 0, 3])
    tokens = [dice.randrange(VOCABULARY) for _ in mask]
    logprobs, values = ([dice.gauss(mean, 1) for _ in range(actions)] for mean in (-5, 0))
    return Rollout(
        TokenRecord(tokens=tokens, action_mask=mask, logprobs=logprobs, values=values), [(actions, paid)], group
    )


def a_round(seed: int) -> Batch:
    """One to six episodes; their groups, lengths and rewards are as likely as not all the same."""
    dice = random.Random(seed)
    count, size = dice.randint(1, 6), dice.choice([0.0, 1.0, 1e-9, LARGEST_REWARD])
    groups = dice.choice([[0] * count, list(range(count)), [i // 2 for i in range(count)]])
    length = dice.choice([lambda: 1, lambda: dice.randint(1, 7)])
    paid = dice.choice([lambda: size, lambda: dice.choice([0.0, size]), lambda: size * dice.gauss(0, 1)])
    return Batch.of([episode(dice, paid(), group, length()) for group in groups])


ROUNDS = range(60)
SUMS = ("dr-grpo", "rloo", "dpo", "verifree")  # over tokens: every token weighs the same


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_advantages_and_weights_are_numbers(algorithm):
    for seed in ROUNDS:
        batch = a_round(seed)
        rl_algorithm = ALGORITHMS[algorithm](paper(algorithm), LengthSettings())
        if rl_algorithm.kl_in is None:
            batch = replace(batch, reference=batch.logprobs * 1.5)
        with_advantages = rl_algorithm.with_advantages(batch)
        weights = rl_algorithm.weights(with_advantages)[batch.action_mask]
        assert with_advantages.advantages.isfinite().all() and not with_advantages.advantages[~batch.action_mask].any()
        assert (weights > 0).all()
        if algorithm not in SUMS:
            assert float(weights.sum()) == pytest.approx(1)
        else:
            assert weights.unique().numel() == 1
        assert all(abs(x) < float("inf") for x in rl_algorithm.statistics(with_advantages).values())


def test_a_group_is_compared_with_itself_alone():
    """Advantages of a group add up to 0, are of size 1, and depend neither on what all got nor on other groups."""
    grpo = ALGORITHMS["grpo"](paper("grpo"), LengthSettings())
    compared = 0
    for seed in ROUNDS:
        batch = a_round(seed)
        advantages = grpo.with_advantages(batch).advantages[:, 1]
        for group in batch.groups.unique():
            rows = torch.nonzero(batch.groups == group)[:, 0]
            assert abs(float(advantages[rows].sum())) < 1e-4 and float(advantages[rows].norm()) <= len(rows) ** 0.5
            alone = grpo.with_advantages(batch.select(rows.tolist())).advantages[:, 1]
            assert torch.equal(alone, advantages[rows])
            totals = batch.rewards.sum(-1)[rows]
            if len(rows) == 1 or totals.unique().numel() == 1:
                assert not advantages[rows].any()
            elif totals.std() > 0.1:
                assert float(advantages[rows].norm()) == pytest.approx((len(rows) - 1) ** 0.5, rel=1e-2)
                compared += 1
    assert compared > 5


def test_whitened_advantages_have_mean_0_and_variance_1_or_are_all_0():
    ppo = ALGORITHMS["ppo"](paper("ppo", kl_beta=0.0), LengthSettings())
    variances = []
    for seed in ROUNDS:
        batch = a_round(seed)
        advantages = (ppo.with_advantages(batch).advantages)[batch.action_mask]
        variance = float(advantages.var(correction=0)) if len(advantages) > 1 else 0.0
        assert abs(float(advantages.mean())) < 1e-3 and (variance == pytest.approx(1, abs=1e-2) or variance < 1e-3)
        variances.append(variance)
    assert sum(variances) > len(ROUNDS) / 2


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_round_is_learned_from(setup, algorithm, seed):
    """Whatever it is made of, the steps and all metrics are finite numbers."""
    harness = setup(algorithm, update_epochs=2, mini_batch_size=2, entropy_coefficient=0.01)
    measured = harness.learner.learn(a_round(seed), "seed")
    assert harness.steps and all(step.isfinite().all() for step in harness.steps)
    assert all(abs(x) < float("inf") for x in measured.values())


@pytest.mark.parametrize("paid", [float("nan"), float("inf"), -float("inf"), 1e39])
def test_a_reward_that_is_no_number_is_a_bug(paid):
    with pytest.raises(AssertionError, match="finite"):
        Batch.of([replace(episode(random.Random(0), 0.0, 0, 2), token_rewards=[(1, 0.5), (2, paid)])])
