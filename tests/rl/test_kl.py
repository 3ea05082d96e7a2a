"""The KL divergence: where it enters, by which estimator, and a weight that follows a target."""

import json
import math
from dataclasses import replace

import pytest
import torch

from r3lite.core.config import UsageError
from r3lite.core.errors import R3LiteError
from r3lite.core.token_record import TokenRecord
from r3lite.rl import losses
from r3lite.rl.algorithms import ALGORITHMS
from r3lite.rl.algorithms.base import KlMultiplier
from r3lite.rl.batch import Batch, Rollout
from r3lite.rl.learner import kl_on_policy
from r3lite.settings import LengthSettings
from tests.errors import raises
from tests.rl.conftest import moved, paper


def test_the_controller_by_hand():
    """KL at twice its target is an error of 1, cut to 0.2: times 1.02. At 0.9 of it, -0.1: times 0.99. At 0: 0.98."""
    kl, factors = KlMultiplier(target=0.1), []
    for measured in (0.2, 0.09, 0.0):
        kl.update(measured)
        factors.append(kl.factor)
    assert factors == pytest.approx([1.02, 1.02 * 0.99, 1.02 * 0.99 * 0.98])


def test_a_round_without_a_finite_kl_leaves_it():
    """A pass that overflowed fp16 made the factor nan, and with it all later losses, although the step was skipped."""
    kl = KlMultiplier(target=0.1)
    kl.update(math.nan)
    assert kl.factor == 1.0
    kl.update(math.inf)
    assert kl.factor == pytest.approx(1.02)


def test_without_a_target_it_stays():
    kl = KlMultiplier(target=None)
    kl.update(3.0)
    assert kl.factor == 1.0


def test_its_state_goes_through_json_to_the_bit():
    kl = KlMultiplier(0.1)
    restored = KlMultiplier(0.1)
    kl.update(0.117)
    restored.load_state_dict(json.loads(json.dumps(kl.state_dict())))
    assert restored.factor == kl.factor != 1.0
    with pytest.raises(R3LiteError, match="factor"):
        restored.load_state_dict({"factor": "much"})


@pytest.mark.parametrize("algorithm", [name for name, cls in ALGORITHMS.items() if cls.kl_in is not None])
def test_a_round_follows_the_target(batch, setup, algorithm):
    """What was used is a metric; the next round has more or less, by how far the KL of this one was from the target."""
    harness = setup(algorithm, kl_beta=0.5, kl_target=1e-9)
    measured = harness.learner.learn(batch, "seed")
    assert measured["kl"] > 1e-9 and measured["kl_beta"] == 0.5
    assert harness.algorithm.kl_weight == pytest.approx(0.51)
    assert harness.learner.learn(batch, "seed")["kl_beta"] == pytest.approx(0.51)
    assert "kl_beta" not in setup(algorithm, kl_beta=0.5).learner.learn(batch, "seed")


@pytest.mark.parametrize("algorithm", [name for name, cls in ALGORITHMS.items() if cls.kl_in == "loss"])
def test_beta_is_the_weight_in_the_loss(batch, setup, algorithm):
    """The gradient is linear in it, with whatever weight the controller has come to."""
    gradients = []
    for factor in (1.0, 2.0, 3.0):
        harness = setup(algorithm, kl_beta=0.1, kl_target=1.0)
        harness.algorithm.kl_multiplier.scale = factor
        harness.learner.learn(moved(batch, 0.01), "seed")
        gradients.append(harness.steps[0])
    one, two, three = gradients
    assert torch.allclose(two - one, three - two, atol=1e-6) and (two - one).norm() > 1e-3


def test_k2_by_hand():
    assert losses.k2_kl(torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.5])).tolist() == [0.5, 0.125]


@pytest.mark.parametrize(("estimate", "gradient_is_right"), [("k1", False), ("k2", True)])
def test_whose_gradient_is_that_of_the_divergence(estimate, gradient_is_right):
    """In the mean over what the policy samples; k1's is 0. (k3's is that of the divergence the other way round.)"""
    torch.manual_seed(0)
    logits, reference = torch.randn(6).double().requires_grad_(), torch.randn(6).double().log_softmax(0)
    logp = logits.log_softmax(0)
    (wanted,) = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits, retain_graph=True)
    mean = (logp.exp().detach() * losses.KL_ESTIMATES[estimate](logp, reference)).sum()
    (got,) = torch.autograd.grad(mean, logits)
    assert torch.allclose(got, wanted if gradient_is_right else torch.zeros(6).double()) and wanted.norm() > 0.1


@pytest.mark.parametrize("estimate", losses.KL_ESTIMATES)
@pytest.mark.parametrize("algorithm", [name for name, cls in ALGORITHMS.items() if cls.kl_in == "reward"])
def test_the_estimate_is_taken_off_the_reward(batch, setup, algorithm, estimate):
    harness = setup(algorithm, kl_beta=0.5, kl_estimator=estimate)
    off_policy = moved(batch)
    reference = harness.learner.reference_logprobs(off_policy)
    d = off_policy.logprobs - reference
    by_hand = {"k1": d, "k2": d * d / 2, "k3": (-d).exp() + d - 1}[estimate]
    paid = harness.algorithm.penalized_rewards(replace(off_policy, reference=reference))
    assert torch.allclose(paid, off_policy.rewards - 0.5 * by_hand * off_policy.action_mask, atol=1e-6)


@pytest.mark.parametrize("algorithm", [name for name, cls in ALGORITHMS.items() if cls.kl_in == "loss"])
def test_k1_in_a_loss_is_refused(algorithm):
    with raises(UsageError, "kl-estimator-zero"):
        ALGORITHMS[algorithm](paper(algorithm, kl_beta=0.1, kl_estimator="k1"), LengthSettings())


class ScriptedBudget:
    """A budget that always accepts, or never, and notes the KL of each round."""

    def __init__(self, answer: bool):
        self.answer = answer
        self.kls: list[float] = []
        self.metrics = {"kl_budget/scale": 0.5}

    def judge_last_update(self, kl: float, error: float) -> bool:
        self.kls.append(kl)
        return self.answer


def test_the_kl_of_a_round_and_its_error_over_questions_by_hand():
    """k3 of d = 0 is 0, of d = log 2 it is 1/2 + log 2 - 1 = 0.19315, of d = -log 2: 2 - log 2 - 1 = 0.30685.

    Question 0 has three tokens and 0.5 in sum, question 1 one token and 0.19315: the mean is 0.69315 / 4 = 0.17329. The
    squares of 0.5 - 3 * 0.17329 and 0.19315 - 0.17329 add up to 2 * 0.01986^2; twice that, its root, by 4: 0.00993.
    """
    log2 = math.log(2)
    rollouts = [
        Rollout(
            TokenRecord(tokens=[1, 2, 3], action_mask=[False, True, True], logprobs=[-1.0, -2.0], values=[0.0, 0.0]),
            [(2, 1.0)],
            group=0,
        ),
        Rollout(
            TokenRecord(tokens=[1, 2], action_mask=[False, True], logprobs=[-1.0], values=[0.0]), [(1, 1.0)], group=0
        ),
        Rollout(
            TokenRecord(tokens=[1, 2], action_mask=[False, True], logprobs=[-1.0], values=[0.0]), [(1, 1.0)], group=1
        ),
        Rollout(
            TokenRecord(tokens=[1, 2], action_mask=[False, True], logprobs=[-9.0], values=[0.0]),
            [(1, 1.0)],
            group=1,
            off_policy=True,
        ),
    ]
    batch = Batch.of(rollouts)
    reference = torch.tensor([[5.0, -1.0, -2.0 + log2], [5.0, -1.0 - log2, 0], [5.0, -1.0 - log2, 0], [0, 0, 0]])
    mean, error = kl_on_policy(replace(batch, reference=reference))
    assert (mean, error) == pytest.approx((0.17329, 0.00993), abs=1e-5)
    assert kl_on_policy(replace(batch, reference=reference).select([0, 1]))[1] == math.inf


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "reinforce++-baseline"])
def test_with_a_budget_the_kl_is_measured_before_the_update_even_if_it_is_not_punished(batch, setup, algorithm):
    harness = setup(algorithm, kl_beta=0.0, kl_budget=0.01)
    harness.learner.budget = ScriptedBudget(True)
    reference = harness.learner.reference_logprobs(batch)
    measured = harness.learner.learn(batch, "seed")
    wanted = losses.k3_kl(batch.logprobs, reference)[batch.action_mask].mean()
    assert harness.learner.budget.kls[0] == pytest.approx(float(wanted), rel=1e-4)
    assert measured["kl"] > 0 and measured["kl_budget/scale"] == 0.5
    plain = setup(algorithm, kl_beta=0.0)
    assert "kl" not in plain.learner.learn(batch, "seed")
    assert (
        all(torch.equal(step, plain_step) for step, plain_step in zip(harness.steps, plain.steps, strict=True))
        and plain.steps
    )


def test_nothing_is_learned_from_episodes_of_an_update_that_was_taken_back(batch, setup):
    harness = setup("grpo", kl_budget=0.01)
    harness.learner.budget = ScriptedBudget(False)
    assert harness.learner.learn(batch, "seed") == {"kl_budget/scale": 0.5} and harness.steps == []
