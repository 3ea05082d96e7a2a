"""LUFFY, ExGRPO and both: numbers worked by hand from the papers."""

from dataclasses import replace
from itertools import chain

import pytest
import torch

from r3lite.core.token_record import TokenRecord
from r3lite.rl import losses
from r3lite.rl.algorithms import ALGORITHMS
from r3lite.rl.batch import ActionTokens, Batch, Rollout
from r3lite.settings import LengthSettings
from tests.rl.conftest import moved, paper

MIXED = ["luffy", "exgrpo", "hybrid"]


def algorithm(name: str, **settings):
    return ALGORITHMS[name](paper(name, **settings), LengthSettings())


def rollout(tokens: int, paid: float, group: int = 0, off_policy: bool = False) -> Rollout:
    mask = [False] + [True] * tokens
    return Rollout(
        TokenRecord(tokens=[1] * len(mask), action_mask=mask, logprobs=[0.0] * tokens, values=[0.0] * tokens),
        [(tokens, paid)],
        group,
        cut_off=False,
        off_policy=off_policy,
    )


def test_shaping_by_hand():
    """f(r) = r / (r + 0.1): 1 / 1.1, 0.5 at r = 0.1, 0.01 / 0.11; by log r its slope is f (1 - f): 1 / 4 at r = 0.1."""
    log_ratios = torch.tensor([1.0, 0.1, 0.01]).log().requires_grad_()
    loss, f = losses.shaped_surrogate(log_ratios, torch.tensor([1.0, 2.0, -1.0]), 0.1)
    assert f.tolist() == pytest.approx([1 / 1.1, 0.5, 1 / 11])
    assert loss.tolist() == pytest.approx([-1 / 1.1, -1.0, 1 / 11])
    loss.sum().backward()
    assert log_ratios.grad.tolist() == pytest.approx([-1 / 1.1 / 11, -0.5, 1 / 11 * 10 / 11])


def test_no_ratio_overflows():
    log_ratios = torch.tensor([-500.0, 0.0, 500.0]).requires_grad_()
    loss, _ = losses.shaped_surrogate(log_ratios, torch.ones(3), 0.1)
    loss.sum().backward()
    assert loss.isfinite().all() and log_ratios.grad.isfinite().all()


@pytest.mark.parametrize("name", MIXED)
def test_loss_by_hand(name):
    """An on-policy token has GRPO's loss: ratio 1.5 is cut to 1.2. A teacher's of probability 0.3: 0.3 / 0.4 of A, no
    KL. A replayed one, 0.3 now and 0.6 then: 0.5 / 0.6 of A. Of a ratio of 5, too, which a clip would cut off."""
    old = torch.tensor([0.2, 1.0, 0.6, 0.1]).log()
    logprobs = torch.tensor([0.3, 0.3, 0.3, 0.5]).log().requires_grad_()
    entropy, reference = torch.full((4,), 2.0), torch.tensor([0.3, 0.9, 0.9, 0.9]).log()
    actions = ActionTokens(
        old, old, 0 * old, advantages=torch.tensor([1.0, 1.0, 2.0, 1.0]), weights=0 * old, reference=reference,
        value_targets=None, off_policy=torch.tensor([False, True, True, True]),
    )  # fmt: skip
    loss, metrics = algorithm(name, kl_beta=0.5, entropy_coefficient=0.1).loss(actions, logprobs, entropy)
    assert loss.tolist() == pytest.approx([-1.2 - 0.2, -0.75 - 0.2, -2 * 5 / 6 - 0.2, -5 / 5.1 - 0.2])
    loss.sum().backward()
    # -A f (1 - f), by log pi; nothing for the clipped one but its KL, whose slope is 0 where it is the reference's.
    expected = [0.0, -0.75 * 0.25, -2 * 5 / 6 / 6, -5 / 5.1 * 0.1 / 5.1]
    assert logprobs.grad.tolist() == pytest.approx(expected, abs=1e-6)
    assert metrics["off_policy/shaped_ratio"][1:].tolist() == pytest.approx([0.75, 5 / 6, 5 / 5.1])


def test_a_confident_reference_or_policy_makes_no_nan():
    """What the reference says of a token that the policy holds to be impossible: exp(200) is inf, and inf * 0 nan."""
    logprobs = torch.tensor([-200.0]).requires_grad_()
    zero = torch.zeros(1)
    actions = ActionTokens(
        zero, zero, zero, advantages=zero + 1, weights=zero, reference=zero - 1, value_targets=None,
        off_policy=torch.tensor([True]),
    )  # fmt: skip
    loss, _ = algorithm("luffy").loss(actions, logprobs, zero)
    loss.sum().backward()
    assert loss.isfinite() and logprobs.grad.isfinite()


def test_advantages_are_over_both_by_hand():
    """Two wrong episodes and a trace that is paid 1: mean 1/3, sample std 0.57735. Alone they would teach nothing."""
    batch = Batch.of([rollout(2, 0.0), rollout(1, 0.0), rollout(3, 1.0, off_policy=True)])
    assert batch.off_policy.tolist() == [False, False, True]
    luffy = algorithm("luffy")
    advantages = luffy.with_advantages(batch).advantages[:, 1]
    assert advantages.tolist() == pytest.approx([-1 / 3 / 0.57745, -1 / 3 / 0.57745, 2 / 3 / 0.57745], rel=1e-4)
    assert torch.allclose(luffy.weights(batch), batch.action_mask / torch.tensor([[6.0], [3.0], [9.0]]))
    assert luffy.statistics(batch) == {"frac_reward_zero_std": 0.0, "off_policy/token_share": 0.5}


@pytest.mark.parametrize("name", MIXED)
def test_off_policy_tokens_have_a_gradient(gradients, batch, name):
    """One published implementation takes their log-probabilities without one, and so never learns from a trace."""
    rewards = torch.zeros_like(batch.rewards)
    rewards[1, 2], rewards[3, 2] = 1.0, 1.0
    mixed = replace(moved(batch), rewards=rewards, off_policy=torch.tensor([False, True, False, True]))
    (got,), _ = gradients(mixed, name, kl_beta=0.0, negative_advantage_scale=0.0)  # nothing is learned from the others
    assert got.norm() > 1e-3


def test_old_log_probabilities_of_off_policy_episodes_stay(batch):
    rescored = batch.logprobs - 1
    assert torch.equal(batch.with_trainer_logprobs(rescored).trainer_logprobs, rescored)
    mixed = replace(batch, off_policy=torch.tensor([False, True, False, True])).with_trainer_logprobs(rescored)
    assert torch.equal(mixed.trainer_logprobs[1], batch.logprobs[1])
    assert torch.equal(mixed.trainer_logprobs[0], rescored[0])


def test_off_policy_episodes_add_no_steps():
    """72 episodes in mini-batches of 32 would have a third of 8, with the same learning rate."""
    rollouts = [rollout(1, 0.0, group=i // 8) for i in range(64)] + [rollout(1, 1.0, i, True) for i in range(8)]
    batch = Batch.of(rollouts)
    parts = batch.mini_batches(32, "s", by_group=algorithm("luffy").has_groups)
    assert [len(part) for part in parts] == [36, 36] and sorted(chain(*parts)) == list(range(72))
    assert all(
        {int(batch.groups[i]) for i in part if i >= 64} == {int(batch.groups[i]) for i in part} for part in parts
    )
    assert [len(part) for part in Batch.of(rollouts[:64]).mini_batches(24, "s", by_group=False)] == [21, 21, 22]


def test_how_many_may_join():
    sizes = {"batch_size": 8, "trace_share": 0.5, "replay_share": 0.3}
    assert [algorithm(name, **sizes).max_off_policy for name in MIXED] == [4, 3, 7]
    assert algorithm("grpo").max_off_policy == 0


def test_the_default_shaping_is_that_of_luffy():
    """gamma of arXiv 2504.14945."""
    assert algorithm("luffy").settings.shaping_gamma == 0.1
