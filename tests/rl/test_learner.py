"""A round's learning on a small model: what carries gradient, that batching changes nothing, and any algorithm."""

from dataclasses import replace
from itertools import chain

import pytest
import torch

from r3lite.rl import learner as learner_module
from r3lite.rl.algorithms import ALGORITHMS
from r3lite.rl.algorithms.base import Algorithm


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_observations_carry_nothing(batch, gradients, algorithm):
    """Retrieved tokens were once masked in the policy loss alone, and still steered GAE, whitening and the critic."""
    (expected,), measured = gradients(batch, algorithm)

    def noisy(x):
        return x + torch.randn(x.shape) * 10 * ~batch.action_mask

    changed = replace(batch, values=noisy(batch.values), logprobs=noisy(batch.logprobs))
    if algorithm in ("ppo", "reinforce++"):  # of others, the return is the sum of all rewards, paid at actions only
        changed = replace(changed, rewards=noisy(batch.rewards))
    (got,), changed_metrics = gradients(changed, algorithm)
    assert torch.equal(got, expected) and expected.norm() > 0
    keys = {"loss", "kl", "entropy", "grad_norm"} & measured.keys()
    assert {k: measured[k] for k in keys} == {k: changed_metrics[k] for k in keys}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_micro_batches_change_nothing(batch, gradients, algorithm):
    """Denominators are those of the mini-batch: splitting it gives the same gradient."""
    (full_gradient,), measured = gradients(batch, algorithm)
    (split_gradient,), split_metrics = gradients(batch, algorithm, micro_batch_size=1)
    assert torch.allclose(full_gradient, split_gradient, atol=1e-6)
    assert list(measured) == list(split_metrics)
    assert all(measured[k] == pytest.approx(split_metrics[k], abs=1e-5) for k in measured)


def test_several_epochs_and_mini_batches_take_that_many_steps(batch, gradients):
    steps, measured = gradients(batch, "ppo", update_epochs=3, mini_batch_size=2)
    assert len(steps) == 6 and measured["clip_ratio/high_mean"] == 0  # nothing was updated, so nothing moved


def test_the_reference_is_read_at_actions_only(setup, batch, reference):
    logprobs = setup().learner.reference_logprobs(batch)
    assert torch.allclose(logprobs[batch.action_mask], reference, atol=1e-6) and not logprobs[~batch.action_mask].any()
    assert (reference - batch.logprobs[batch.action_mask]).abs().max() > 0.01


def test_mini_batches_are_about_as_large(sampled):
    """Seven episodes in steps of at most three: the last one is no step of its own."""
    seven = sampled(["..a"] * 7, [1.0] * 7)
    for limit, sizes in ((3, [2, 2, 3]), (4, [3, 4]), (5, [3, 4]), (6, [3, 4]), (7, [7]), (9, [7])):
        steps = seven.mini_batches(limit, "s", by_group=False)
        assert [len(rows) for rows in steps] == sizes and sorted(chain(*steps)) == list(range(7))


@pytest.mark.parametrize(("algorithm", "together"), [("grpo", True), ("ppo", False)])
def test_mini_batches_keep_together_what_the_algorithm_says(batch, setup, algorithm, together):
    groups = batch.groups.tolist()
    by_group = setup(algorithm).algorithm.has_groups
    orders = [batch.mini_batches(groups.count(0), str(seed), by_group) for seed in range(20)]
    assert all(sorted(chain(*order)) == list(range(len(groups))) for order in orders)
    assert len({str(order) for order in orders}) > 1
    assert all(len({groups[i] for i in rows}) == 1 for order in orders for rows in order) == together


def test_negative_advantages_can_weigh_less(batch, setup, gradients, logprobs, gradient_of):
    """With scale 0 only what was better than expected teaches: the same gradient as with those episodes alone."""
    (got,), _ = gradients(batch, "grpo", kl_beta=0.0, negative_advantage_scale=0.0)
    advantages = setup("grpo").algorithm.with_advantages(batch).advantages
    better = advantages.sum(-1) > 0
    assert better.tolist() == [True, False, True, False]
    weights = batch.action_mask / batch.action_mask.sum(-1, keepdim=True) / 4 * better[:, None]
    loss = -((logprobs - logprobs.detach()).exp() * (advantages * weights)[batch.action_mask]).sum()
    assert torch.allclose(got, gradient_of(loss), atol=1e-6) and got.norm() > 0


def test_memory_figures_are_read_anew_each_time(batch, setup, monkeypatch):
    """They shrink in the middle of a round if a device runs out of memory."""
    harness = setup("grpo", micro_batch_size=None)
    chunks = []
    token_loss = learner_module.token_loss

    def noting(hidden, head, targets, loss, temperature, chunk, with_entropy):
        chunks.append(chunk)
        return token_loss(hidden, head, targets, loss, temperature, chunk, with_entropy)

    monkeypatch.setattr(learner_module, "token_loss", noting)
    harness.learner.learn(batch, "seed")
    harness.learner.grant.memory = replace(harness.learner.grant.memory, micro_batch_tokens=1, loss_chunk=3)
    harness.learner.learn(batch, "seed")
    assert chunks == [128] + [3] * 4
    assert torch.allclose(*harness.steps, atol=1e-6)


def test_an_overflow_is_explained_by_the_newest_micro_batch(batch, setup, model):
    learner = setup("grpo").learner
    learner.learn(batch, "seed")
    assert learner.explain_overflow().startswith("no layer overflowed")
    model.model.layers[1].post_attention_layernorm.weight[0] = float("inf")
    assert learner.explain_overflow().startswith("model.layers.1 was the first layer to give inf or nan")


class Reinforce(Algorithm):
    """-R log pi, a mean over the tokens of the mini-batch: REINFORCE without a baseline."""

    def with_advantages(self, batch):
        return replace(batch, advantages=batch.rewards.sum(-1)[:, None] * batch.action_mask)

    def weights(self, batch):
        return batch.action_mask / batch.action_mask.sum()

    def loss(self, actions, logprobs, entropy):
        return -actions.advantages * logprobs, {"surprise": -logprobs}


def test_another_algorithm_needs_no_change_to_the_learner(batch, gradients, logprobs, gradient_of):
    (got,), measured = gradients(batch, Reinforce, kl_beta=0.0, micro_batch_size=1)
    returns = (batch.rewards.sum(-1)[:, None].expand_as(batch.rewards))[batch.action_mask]
    expected = -(returns * logprobs).mean()
    assert torch.allclose(got, gradient_of(expected), atol=1e-6) and got.norm() > 0
    metric_names = [name for name in measured if not name.startswith("sampling/")]
    assert metric_names == ["loss", "entropy", "surprise", "grad_norm", "frac_reward_zero_std"]
    assert measured["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert measured["surprise"] == pytest.approx(-logprobs.mean().item(), rel=1e-5)
