from dataclasses import replace
from itertools import chain, permutations

import torch

from r3lite.core.config import UsageError
from r3lite.core.token_record import TokenRecord
from r3lite.rl.algorithms import ALGORITHMS
from r3lite.rl.algorithms.grpo import Grpo
from r3lite.rl.batch import ActionTokens, Batch, Rollout
from r3lite.settings import LengthSettings, RLSettings
from tests.errors import raises


def test_advantages_and_weights_by_hand():
    """Two episodes of one question, paid 1 and 0, with two action tokens and one."""
    batch = Batch.of(
        [
            Rollout(
                TokenRecord(tokens=[1, 2, 3], action_mask=[False, True, True], logprobs=[0.0] * 2, values=[0.0] * 2),
                [(2, 1.0)],
                0,
            ),
            Rollout(TokenRecord(tokens=[1, 4], action_mask=[False, True], logprobs=[0.0], values=[0.0]), [], 0),
        ]
    )
    algorithm = Grpo(RLSettings(algorithm="grpo"), LengthSettings())
    # mean 0.5, sample std 0.70711: +-0.5 / (0.70711 + 0.0001)
    expected = torch.tensor([[0.0, 0.7070068, 0.7070068], [0.0, -0.7070068, 0.0]])
    assert torch.allclose(algorithm.with_advantages(batch).advantages, expected, atol=1e-6)
    assert torch.equal(algorithm.weights(batch), torch.tensor([[0.0, 0.25, 0.25], [0.0, 0.5, 0.0]]))


def test_loss_by_hand():
    """Ratio 1, A = 2, log p = -1, reference -2: -2 - 0.1 * entropy 3 + 0.5 * k3, k3 = e^-1 + 1 - 1 = 0.36788."""
    algorithm = Grpo(RLSettings(algorithm="grpo", kl_beta=0.5, entropy_coefficient=0.1), LengthSettings())
    x = torch.ones(1)
    actions = ActionTokens(-x, -x, 0 * x, advantages=2 * x, weights=x, reference=-2 * x, value_targets=None)
    loss, metrics = algorithm.loss(actions, -x, 3 * x)
    assert torch.allclose(loss, torch.tensor([-2 - 0.3 + 0.5 * 0.3678794]))
    assert torch.allclose(metrics["kl"], torch.tensor([0.3678794]))
    assert metrics.keys() == {"clip_ratio/low_mean", "clip_ratio/high_mean", "kl"}


def test_the_gradient_equals_the_formula(batch, gradients, logprobs, reference, gradient_of):
    """Against the loss written out in one expression, episode by episode, on-policy: ratio 1."""
    (got,), _ = gradients(batch, "grpo", kl_beta=0.05)
    loss, at = 0.0, 0
    for i, count in enumerate(batch.action_mask.sum(-1).tolist()):
        pair = batch.rewards.sum(-1)[i // 2 * 2 : i // 2 * 2 + 2]
        advantage = (batch.rewards.sum(-1)[i] - pair.mean()) / (pair.std() + 1e-4)
        rows = slice(at, at + count)
        d = reference[rows] - logprobs[rows]
        ratio = (logprobs[rows] - logprobs[rows].detach()).exp()
        loss = loss - (ratio * advantage - 0.05 * (d.exp() - d - 1)).mean() / 4
        at += count
    assert torch.allclose(got, gradient_of(loss), atol=1e-6)


def test_equal_returns_teach_nothing(batch, gradients):
    """The rounding error of r - mean(r) once did: AdamW knows no scale, and took full steps away from good answers."""
    rewards = 0.1 * batch.action_mask / batch.action_mask.sum(-1, keepdim=True)
    equal = replace(batch, rewards=rewards, signals=rewards.sum(-1))
    (got,), measured = gradients(equal, "grpo", kl_beta=0.0)
    assert got.norm() == 0 and measured["frac_reward_zero_std"] == 1.0
    assert "explained_variance" not in measured


def test_groups_stay_together():
    assert Grpo.has_groups
    rollouts = [
        Rollout(TokenRecord(tokens=[1, 2], action_mask=[False, True], logprobs=[0.0], values=[0.0]), [], group)
        for group in (0, 1, 0, 1, 2)
    ]
    steps = Batch.of(rollouts).mini_batches(1, "s", by_group=True)
    order = [row for step in steps for row in step]
    assert order in [list(chain(*units)) for units in permutations([[0, 2], [1, 3], [4]])]


def test_a_group_of_one_is_refused():
    with raises(UsageError, "group-of-one", "--num-generations is 1, but GRPO compares episodes of a question"):
        ALGORITHMS["grpo"](RLSettings(algorithm="grpo", num_generations=1), LengthSettings())
