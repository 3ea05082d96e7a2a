from dataclasses import replace

import pytest
import torch

from r3lite.core.token_record import TokenRecord
from r3lite.rl.algorithms.ppo import Ppo
from r3lite.rl.batch import ActionTokens, Batch, Rollout
from r3lite.settings import LengthSettings, RLSettings


def test_advantages_weights_and_statistics_by_hand():
    batch = Batch.of(
        [
            Rollout(
                TokenRecord(
                    tokens=[1, 2, 9, 3], action_mask=[False, True, False, True], logprobs=[0.0] * 2, values=[0.5, 0.2]
                ),
                [(3, 1.0)],
                0,
            )
        ]
    )
    algorithm = Ppo(RLSettings(kl_beta=0.0, gamma=0.9, gae_lambda=0.5), LengthSettings())
    with_advantages = algorithm.with_advantages(batch)
    # delta_1 = 1 - 0.2 = 0.8; delta_0 = 0.9 * 0.2 - 0.5 = -0.32; A_0 = -0.32 + 0.9 * 0.5 * 0.8 = 0.04
    assert torch.allclose(with_advantages.value_targets, torch.tensor([[0.0, 0.54, 0.0, 1.0]]))
    # mean 0.42, both are 0.38 from it: whitened -1 and 1
    assert torch.allclose(with_advantages.advantages, torch.tensor([[0.0, -1.0, 0.0, 1.0]]))
    assert torch.equal(algorithm.weights(batch), torch.tensor([[0.0, 0.5, 0.0, 0.5]]))
    # targets 0.54 and 1: variance 0.23^2; errors 0.04 and 0.8: variance 0.38^2
    statistics = algorithm.statistics(with_advantages)
    assert statistics["explained_variance"] == pytest.approx(1 - 0.38**2 / 0.23**2, rel=1e-5)
    assert statistics["frac_reward_zero_std"] == 1.0


def test_losses_by_hand():
    """Ratio 1 and A = 2: -2 - 0.1 * entropy 3; the KL is reported, not in the loss. V = 0.5 is clipped to 0.2."""
    algorithm = Ppo(RLSettings(kl_beta=0.5, entropy_coefficient=0.1, value_clip=0.2), LengthSettings())
    x = torch.ones(1)
    actions = ActionTokens(-x, -x, 0 * x, advantages=2 * x, weights=x, reference=-2 * x, value_targets=x)
    loss, metrics = algorithm.loss(actions, -x, 3 * x)
    assert torch.allclose(loss, torch.tensor([-2.3])) and torch.allclose(metrics["kl"], torch.tensor([0.3678794]))
    loss, metrics = algorithm.value_loss(actions, 0.5 * x)
    assert torch.allclose(loss, torch.tensor([0.32])) and torch.equal(metrics["value_loss"], loss)


def test_the_kl_is_paid_as_a_penalty_on_every_action(batch, setup):
    harness = setup("ppo", kl_beta=0.5)
    reference = harness.learner.reference_logprobs(batch)
    with_kl = harness.algorithm.with_advantages(replace(batch, reference=reference))
    penalty = 0.5 * (batch.logprobs - reference) * batch.action_mask
    by_hand = harness.algorithm.with_advantages(replace(batch, rewards=batch.rewards - penalty))
    assert torch.allclose(with_kl.value_targets, by_hand.value_targets)
    assert torch.allclose(with_kl.advantages, by_hand.advantages) and penalty.abs().max() > 0.01
