"""How far the trainer's log-probabilities are from the sampler's: by hand, and as a round of learning measures it."""

import math
from dataclasses import replace

import pytest
import torch

from r3lite.models import lora
from r3lite.rl.losses import sampling_metrics

MEAN, MAX = (f"sampling/sampling_logp_difference/{statistic}" for statistic in ("mean", "max"))
OUTSIDE = "sampling/outside_clip_first_epoch"


def test_by_hand():
    """The differences are those of the first mini-batch; of all ratios 0.74, 1.2 and 0.7 are outside 0.8 to 1.1."""
    first, second = torch.tensor([0.0, -0.3, 0.06]), torch.tensor([math.log(1.2), math.log(0.7)])
    token = [torch.stack((x, x)) for x in (first, second)]
    metrics = sampling_metrics(token, clip_low=0.2, clip_high=0.1)
    assert metrics == pytest.approx({MEAN: 0.12, MAX: 0.3, OUTSIDE: 3 / 5}, rel=1e-6)


def test_the_ratio_that_is_clipped_may_be_another_one():
    """Each token differs by 0.3 one way or the other; the mean of both, which is clipped, does not."""
    metrics = sampling_metrics([torch.tensor([[0.3, -0.3], [0.0, 0.0]])], clip_low=0.2, clip_high=0.2)
    assert metrics == pytest.approx({MEAN: 0.3, MAX: 0.3, OUTSIDE: 0.0})


def test_the_differences_are_those_before_the_first_optimizer_step(batch, setup, model):
    """Two epochs of four mini-batches; every step moves the policy, so what comes later is another policy's."""
    harness = setup("ppo", mini_batch_size=1, update_epochs=2)

    def moved():
        for parameter in lora.adapter_parameters(model, "policy").values():
            parameter.data += 0.3
        return 1.0, False

    harness.learner.optimizer_step = moved
    measured = harness.learner.learn(batch, "seed")
    assert measured[MAX] < 1e-5
    assert 0.5 < measured[OUTSIDE] < 1  # of the first epoch's mini-batches the first alone is inside


@pytest.mark.parametrize("micro_batch_size", [1, 4])
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_what_the_sampler_recorded_otherwise_is_measured(batch, setup, model, algorithm, micro_batch_size):
    """At retrieved tokens nothing is recorded, so nothing differs there. It takes no pass of its own."""
    off = torch.zeros_like(batch.logprobs)
    off[1, 3], off[3, 6], off[~batch.action_mask] = 0.5, -0.25, 9.0
    passes = []
    model.register_forward_hook(lambda *_: passes.append(1))
    harness = setup(algorithm, micro_batch_size=micro_batch_size, kl_beta=0.0, update_epochs=2)
    harness.learner.grant.memory = replace(harness.learner.grant.memory, loss_chunk=3)
    measured = harness.learner.learn(replace(batch, logprobs=batch.logprobs + off), "seed")
    tokens = int(batch.action_mask.sum())
    assert measured[MEAN] == pytest.approx(0.75 / tokens, abs=1e-6)
    assert measured[MAX] == pytest.approx(0.5, abs=1e-5)
    assert measured[OUTSIDE] == pytest.approx(2 / tokens)
    assert len(passes) == 2 * (4 // micro_batch_size)
