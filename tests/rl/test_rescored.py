"""Ratios to the trainer's own log-probabilities, and truncated importance sampling against the sampler's."""

from dataclasses import replace

import pytest
import torch

from r3lite.models import lora
from tests.rl.conftest import moved

TRAINER = {"old_logprobs": "trainer", "kl_beta": 0.0}


@pytest.fixture
def recorded(batch):
    """The batch with recorded log-probabilities that are not those of the trainer: ratios from 0.3 to 2."""
    return moved(batch)


def test_the_ratio_is_1_in_the_first_step_whatever_was_recorded(recorded, batch, gradients):
    """As if the sampler had recorded exactly what the trainer finds; what it did record is still measured."""
    (wanted,), _ = gradients(batch, "grpo", kl_beta=0.0)
    (got,), measured = gradients(recorded, "grpo", **TRAINER)
    assert torch.allclose(got, wanted, atol=1e-6) and wanted.norm() > 0
    assert measured["clip_ratio/low_mean"] == measured["clip_ratio/high_mean"] == 0
    assert measured["sampling/outside_clip_first_epoch"] == 0
    off = (recorded.logprobs - batch.logprobs).abs()[batch.action_mask]
    assert measured["sampling/sampling_logp_difference/mean"] == pytest.approx(float(off.mean()), rel=1e-4)


def test_old_is_what_it_was_before_the_rounds_first_step(recorded, setup, model):
    """Every step moves the policy, so later ratios are not 1; all of them are taken to the same log-probabilities."""
    harness = setup("grpo", **TRAINER, mini_batch_size=1, update_epochs=2)
    old_logprobs = []

    def step():
        for parameter in lora.adapter_parameters(model, "policy").values():
            parameter.data += 0.05
        return 1.0, False

    harness.learner.optimizer_step = step
    loss = harness.algorithm.loss
    harness.algorithm.loss = lambda actions, *args: old_logprobs.append(actions.old_logprobs) or loss(actions, *args)
    initial_logprobs = harness.learner.policy_logprobs(recorded)
    harness.learner.learn(recorded, "seed")
    assert torch.equal(
        torch.cat(old_logprobs).sort().values, initial_logprobs[recorded.action_mask].repeat(2).sort().values
    )


@pytest.mark.parametrize("cap", [0.9, 1.2, 100.0])
def test_importance_weights_by_hand(recorded, batch, setup, gradients, logprobs, gradient_of, cap):
    """Truncated importance sampling is E[min(pi_trainer / pi_sampler, C) ratio A]: here ratio 1, so the gradient is
    that weight times that of A log pi."""
    (got,), measured = gradients(recorded, "grpo", **TRAINER, importance_cap=cap)
    ratio = (batch.logprobs - recorded.logprobs)[batch.action_mask].exp()
    assert ratio.min() < 0.9 and ratio.max() > 1.2
    grpo = setup("grpo", **TRAINER).algorithm
    advantages = grpo.with_advantages(batch).advantages
    weights = (grpo.weights(batch) * advantages)[batch.action_mask] * ratio.clamp(max=cap)
    assert torch.allclose(got, gradient_of(-(weights * logprobs).sum()), atol=1e-6) and got.norm() > 0
    assert measured["sampling/importance_sampling_ratio/mean"] == pytest.approx(float(ratio.mean()), rel=1e-4)


def test_the_kl_and_the_bonus_are_not_weighed(recorded, gradients):
    """Rewards all equal leave them alone in the loss."""
    equal = replace(recorded, rewards=0 * recorded.rewards)
    settings = {"old_logprobs": "trainer", "kl_beta": 0.1, "entropy_coefficient": 0.1}
    (without,), (with_cap,) = (
        gradients(equal, "grpo", **settings)[0],
        gradients(equal, "grpo", **settings, importance_cap=0.5)[0],
    )
    assert torch.equal(without, with_cap) and without.norm() > 0
