"""Dr. GRPO, DAPO, GSPO, RLOO and REINFORCE++: numbers worked by hand from the papers, and when two of them are one."""

import math
from dataclasses import replace

import pytest
import torch

from r3lite.core.token_record import TokenRecord
from r3lite.rl.algorithms import ALGORITHMS
from r3lite.rl.batch import ActionTokens, Batch, Rollout
from r3lite.settings import LengthSettings
from tests.rl.conftest import moved, paper

LENGTHS = LengthSettings(max_hops=2, max_new_tokens=5)  # an episode samples at most 20 tokens


def rollout(tokens: int, paid: float, group: int = 0, cut_off: bool = False) -> Rollout:
    """A prompt of one token and so many that were sampled."""
    mask = [False] + [True] * tokens
    return Rollout(
        TokenRecord(tokens=[1] * len(mask), action_mask=mask, logprobs=[0.0] * tokens, values=[0.0] * tokens),
        [(tokens, paid)],
        group,
        cut_off=cut_off,
    )


def algorithm(name: str, **settings):
    return ALGORITHMS[name](paper(name, **settings), LENGTHS)


def tokens(**fields) -> ActionTokens:
    """What is known of a few action tokens, on-policy where nothing else is said."""
    shape = next(iter(fields.values()))
    nothing = torch.zeros_like(shape)
    fields = {"old_logprobs": nothing, "old_values": nothing, "advantages": nothing, "weights": nothing, **fields}
    fields = {"sampled_logprobs": fields["old_logprobs"], "reference": None, "value_targets": None, **fields}
    return ActionTokens(**fields)


def test_dr_grpo_by_hand():
    """Rewards 1, 0, 0: mean 1/3, no std. 2, 1 and 4 tokens, each over 20 and over three episodes."""
    batch = Batch.of([rollout(2, 1.0), rollout(1, 0.0), rollout(4, 0.0)])
    dr_grpo = algorithm("dr-grpo")
    advantages = dr_grpo.with_advantages(batch).advantages
    assert torch.allclose(advantages[:, 1], torch.tensor([2 / 3, -1 / 3, -1 / 3]))
    assert torch.allclose(advantages, advantages[:, 1:2] * batch.action_mask)
    assert torch.allclose(dr_grpo.weights(batch), batch.action_mask / 60)
    assert torch.allclose(algorithm("dr-grpo", length_constant=4).weights(batch), batch.action_mask / 12)


def test_dapo_by_hand():
    """L_max 20 and L_cache 4: from 16 tokens on an episode pays, -0.5 at 18, -1 at 20."""
    batch = Batch.of([rollout(16, 1.0), rollout(18, 1.0), rollout(20, 0.0, cut_off=True), rollout(2, 0.0)])
    dapo = algorithm("dapo")
    assert dapo.length_penalties(batch).tolist() == pytest.approx([0.0, 0.5, 1.0, 0.0])
    # Rewards 1, 0.5, -1, 0: mean 0.125, sum of squares about it 2.1875, sample std sqrt(2.1875 / 3) = 0.853913
    advantages = dapo.with_advantages(batch).advantages[:, 1]
    assert advantages.tolist() == pytest.approx([x / 0.854013 for x in (0.875, 0.375, -1.125, -0.125)], rel=1e-5)
    # 16 + 18 + 2 tokens count alike, those of the episode that was cut off not at all.
    loss_mask = torch.tensor([1, 1, 0, 1])[:, None] * batch.action_mask
    assert torch.allclose(dapo.weights(batch), loss_mask / 36)
    assert torch.allclose(algorithm("dapo", overlong_filter="off").weights(batch), batch.action_mask / 56)
    statistics = dapo.statistics(batch)
    assert statistics["overlong/penalty"] == pytest.approx(1.5 / 4) and statistics["overlong/filtered"] == 0.25


def test_dapo_clips_higher_above():
    """A = 1: a ratio of 1.25 is inside 1.28, 1.3 is clipped to 1.28; A = -1: 0.75 is clipped to 0.8."""
    old, ratios = torch.zeros(3), torch.tensor([1.25, 1.3, 0.75])
    loss, metrics = algorithm("dapo").loss(tokens(advantages=torch.tensor([1.0, 1.0, -1.0])), ratios.log(), old)
    assert loss.tolist() == pytest.approx([-1.25, -1.28, 0.8])
    assert metrics["clip_ratio/high_mean"].tolist() == [False, True, False]
    assert metrics["clip_ratio/low_mean"].tolist() == [False, False, True]


def test_all_cut_off_teach_nothing():
    batch = Batch.of([rollout(3, 1.0, cut_off=True), rollout(4, 0.0, cut_off=True)])
    assert not algorithm("dapo").weights(batch).any()


def test_gspo_by_hand():
    """Log-ratios 0.3 and -0.1: the episode's ratio is exp(0.1), for both tokens; each has the gradient of its own."""
    actions = tokens(advantages=torch.ones(3)).with_episode_log_ratios(torch.tensor([0.3, -0.1, -0.2]), [2, 1])
    assert actions.episode_log_ratios.tolist() == pytest.approx([0.1, 0.1, -0.2])
    logprobs = torch.tensor([0.3, -0.1, -0.2], requires_grad=True)
    gspo = algorithm("gspo", clip_low=0.5, clip_high=0.5)
    loss, _ = gspo.loss(actions, logprobs, torch.zeros(3))
    assert loss.tolist() == pytest.approx([-math.exp(0.1), -math.exp(0.1), -math.exp(-0.2)])
    loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-math.exp(0.1), -math.exp(0.1), -math.exp(-0.2)])
    # Within the paper's clip, 1 - 3e-4 to 1 + 4e-4, is neither: A = 1 cuts off what is above.
    _, metrics = algorithm("gspo").loss(actions, logprobs, torch.zeros(3))
    assert metrics["clip_ratio/high_mean"].tolist() == [True, True, False]


def test_rloo_by_hand():
    """Rewards 1, 0, 0.5 less 0.1 KL, KL 2, 0 and -5 in sum: 0.8, 0, 1; each less the mean of the other two."""
    batch = Batch.of([rollout(2, 1.0), rollout(1, 0.0), rollout(2, 0.5)])
    reference = torch.tensor([[0.0, -1.5, -0.5], [0.0, 0.0, 0.0], [0.0, 3.0, 2.0]])
    rloo = algorithm("rloo", kl_beta=0.1)
    advantages = rloo.with_advantages(replace(batch, reference=reference)).advantages
    assert advantages[:, 1].tolist() == pytest.approx([0.3, -0.9, 0.6])
    assert torch.allclose(rloo.weights(batch), batch.action_mask / 3)


def test_reinforce_pp_by_hand():
    """Paid 1 and 0 at the ends, less 0.2 KL at each token: worth 0.8, 0.9 | 0.4, of mean 0.7, variance 0.14 / 3."""
    batch = Batch.of([rollout(2, 1.0, group=0), rollout(1, 0.0, group=1)])
    reference = torch.tensor([[0.0, -0.5, -0.5], [0.0, 2.0, 0.0]])
    advantages = algorithm("reinforce++", kl_beta=0.2).with_advantages(replace(batch, reference=reference)).advantages
    std = math.sqrt(0.14 / 3)
    assert advantages.flatten().tolist() == pytest.approx([0, 0.1 / std, 0.2 / std, 0, -0.3 / std, 0], abs=1e-5)
    # With gamma 0.5 the first token is worth 0.5 * 0.9 - 0.1.
    discounted = algorithm("reinforce++", kl_beta=0.2, gamma=0.5)
    worth = torch.tensor([0.35, 0.9, 0.4])
    expected = (worth - worth.mean()) / worth.std(correction=0)
    got = discounted.with_advantages(replace(batch, reference=reference)).advantages[batch.action_mask]
    assert torch.allclose(got, expected, atol=1e-5)


def test_reinforce_baseline_by_hand():
    """Rewards 1, 0 | 0.5, 0.5 less their means: 0.5, 0.5 | -0.5 | 0 | 0 by token, of mean 0.1, variance 0.14."""
    batch = Batch.of([rollout(2, 1.0), rollout(1, 0.0), rollout(1, 0.5, group=1), rollout(1, 0.5, group=1)])
    reinforce = algorithm("reinforce++-baseline")
    advantages = reinforce.with_advantages(batch).advantages[batch.action_mask]
    std = math.sqrt(0.14)
    assert advantages.tolist() == pytest.approx([0.4 / std, 0.4 / std, -0.6 / std, -0.1 / std, -0.1 / std], rel=1e-5)
    assert torch.allclose(reinforce.weights(batch), batch.action_mask / 5)


@pytest.mark.parametrize(
    ("name", "small", "mixed"), [("reinforce++-baseline", 1.0, 1.0), ("grpo", 0.7071, 0.7071), ("dr-grpo", 0.06, 0.5)]
)
def test_what_a_round_with_a_small_difference_only_weighs(name, small, mixed):
    """Of two wrong answers one found 0.12 more; or one is right. Only without a std is the first round's step smaller,
    which is why the preset hotpotqa has dr-grpo: a round without a mixed group took a full step towards recall."""
    estimator = algorithm(name)
    for paid, expected in ((0.12, small), (1.0, mixed)):
        batch = Batch.of([rollout(2, paid), rollout(2, 0.0)])
        advantages = estimator.with_advantages(batch).advantages[batch.action_mask]
        assert advantages.tolist() == pytest.approx([expected, expected, -expected, -expected], abs=1e-3)


def test_groups_are_told_apart_by_their_signals():
    """Rewards 0.3 and 0.1, of answers that are both wrong, and 1 and 0: without variance is one group of two."""
    wrong = [replace(rollout(2, paid), signal=0.0) for paid in (0.3, 0.1)]
    batch = Batch.of([*wrong, rollout(1, 1.0, group=1), rollout(1, 0.0, group=1)])
    assert batch.signals.tolist() == [0.0, 0.0, 1.0, 0.0]
    assert algorithm("dr-grpo").statistics(batch) == {"frac_reward_zero_std": 0.5}
    assert algorithm("dr-grpo").statistics(batch.select([0, 1])) == {"frac_reward_zero_std": 1.0}


def test_reinforce_baseline_is_grpo_up_to_the_spread_where_all_groups_are_alike(sampled, gradients):
    """Rewards 1, 0 in both groups, of 4 tokens each: GRPO divides by the sample std, 0.7071, this by 0.5, of all."""
    batch = moved(sampled(["..aaaa", ".aa.aa", "...aaaa", "..a.aaa"], [1.0, 0.0, 0.0, 1.0], per_turn=0.0))
    (grpo,), (reinforce,) = (gradients(batch, name, kl_beta=0.0)[0] for name in ("grpo", "reinforce++-baseline"))
    assert torch.allclose(grpo * (0.5**0.5 + 1e-4) / 0.5, reinforce, rtol=1e-4, atol=1e-6) and grpo.norm() > 0


def test_reinforce_pp_is_ppo_with_a_critic_that_says_nothing(batch, setup):
    settings = {"kl_beta": 0.05, "gamma": 0.9}
    ppo = setup("ppo", gae_lambda=1.0, **settings)
    reinforce = setup("reinforce++", **settings)
    batch = replace(moved(batch), values=torch.zeros_like(batch.values), reference=batch.logprobs)
    assert torch.equal(*(harness.algorithm.with_advantages(batch).advantages for harness in (ppo, reinforce)))


@pytest.mark.parametrize("clip", [{}, {"clip_low": 0.2, "clip_high": 0.2, "old_logprobs": "sampler"}])
def test_gspo_is_grpo_where_answers_have_one_token(sampled, gradients, clip):
    """On-policy whatever the clip; with the same clip off-policy, too, as then an episode's ratio is its token's."""
    batch = sampled(["..a", "...a", "..a", ".a"], [1.0, 0.2, 0.5, 0.0])
    batch = moved(batch) if clip else batch
    (grpo,), (gspo,) = gradients(batch, "grpo", kl_beta=0.0)[0], gradients(batch, "gspo", **clip, kl_beta=0.0)[0]
    assert torch.allclose(grpo, gspo, rtol=1e-4, atol=1e-6) and grpo.norm() > 0


def test_gspo_is_not_grpo_where_answers_are_longer(sampled, gradients):
    batch = moved(sampled(["..aaa", "..aaa"], [1.0, 0.0]))
    settings = {"clip_low": 9.0, "clip_high": 9.0, "kl_beta": 0.0}
    (grpo,), (gspo,) = (
        gradients(batch, "grpo", **settings)[0],
        gradients(batch, "gspo", old_logprobs="sampler", **settings)[0],
    )
    assert (grpo - gspo).norm() > 0.05 * grpo.norm() > 0


def test_dr_grpo_is_grpo_up_to_a_constant_where_the_std_is_1_and_lengths_are_equal(sampled, gradients):
    """Rewards 0 and sqrt(2) have the sample std 1; of 4 tokens each, GRPO divides by 4 and Dr. GRPO by 8."""
    batch = moved(sampled(["..aaaa", ".aa.aa", "...aaaa", "..a.aaa"], [0.0, 2**0.5, 2**0.5, 0.0], per_turn=0.0))
    (grpo,), _ = gradients(batch, "grpo", kl_beta=0.0)
    (dr_grpo,), _ = gradients(batch, "dr-grpo", length_constant=8, kl_beta=0.0)
    assert torch.allclose(grpo * (1 + 1e-4), 2 * dr_grpo, rtol=1e-4, atol=1e-6) and grpo.norm() > 0


def test_dapo_with_a_symmetric_clip_is_grpo_where_lengths_are_equal(sampled, gradients):
    """Then the mean over all tokens is the mean of the episodes' means; nothing is so long that it pays for it."""
    plain = {"clip_high": 0.2, "kl_beta": 0.05, "kl_estimator": "k3"}
    batch = moved(sampled(["..aaaa", ".aa.aa", "...aaaa", "..a.aaa"], [1.0, 0.2, 0.5, 0.0]))
    (grpo,), (dapo,) = gradients(batch, "grpo", kl_beta=0.05)[0], gradients(batch, "dapo", **plain)[0]
    assert torch.allclose(grpo, dapo, atol=1e-6) and grpo.norm() > 0
    batch = moved(sampled(["..aaaa", "..a", "...aaaa", "..a"], [1.0, 0.2, 0.5, 0.0]))
    (grpo,), (dapo,) = gradients(batch, "grpo", kl_beta=0.05)[0], gradients(batch, "dapo", **plain)[0]
    assert (grpo - dapo).norm() > 0.05 * grpo.norm() > 0


def test_rloo_is_dr_grpo_up_to_a_constant(sampled, gradients):
    """R less the mean of the others is G / (G - 1) times R less the mean of all, here 2; the sum over tokens is 8 times
    that over 8."""
    batch = moved(sampled(["..aaaa", ".aa", "...aaaa", "..a.aa"], [1.0, 0.2, 0.5, 0.0]))
    (rloo,), _ = gradients(batch, "rloo", kl_beta=0.0)
    (dr_grpo,), _ = gradients(batch, "dr-grpo", length_constant=8, kl_beta=0.0)
    assert torch.allclose(rloo, 16 * dr_grpo, rtol=1e-4, atol=1e-5) and rloo.norm() > 0


def test_rounding_is_no_preference():
    """The sums of six equal rewards, given over one to six steps, were pairs of dpo."""
    rollouts = []
    for steps in range(1, 7):
        mask = [False] + [True] * steps
        record = TokenRecord(tokens=[0] * len(mask), action_mask=mask, logprobs=[-1.0] * steps, values=[0.0] * steps)
        rewards = [(t, 0.1 / steps) for t in range(1, steps + 1)] + [(steps, 8.0)]
        rollouts.append(Rollout(record, rewards, 0))
    batch = Batch.of(rollouts)
    batch = replace(batch, reference=batch.logprobs)
    assert batch.rewards.sum(-1).unique().numel() > 1
    dpo = ALGORITHMS["dpo"](paper("dpo"), LengthSettings())
    assert not dpo.with_advantages(batch).advantages.any()
    better = replace(batch, rewards=batch.rewards.clone())
    better.rewards[5, 6] += 0.5
    advantages = dpo.with_advantages(better).advantages
    assert advantages[5, 6] == pytest.approx(0.1 * 0.5 + 0.2 / 6)  # beta / 2, and the likelihood of its six tokens
    assert advantages[:5].sum(-1).tolist() == pytest.approx([-0.1 * 0.5 / 5 * steps for steps in range(1, 6)])
