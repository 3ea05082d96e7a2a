"""The gradient of every trained parameter, off-policy, against the papers' formulas in float64 and plain autograd."""

from dataclasses import replace

import pytest
import torch

from tests.rl.conftest import ACTIONS, taught
from tests.rl.formulas import (
    AT,
    LENGTHS,
    SETTINGS,
    TEMPERATURE,
    Plain,
    dapo_gradients,
    dgpo_gradients,
    dpo_gradient,
    dr_grpo_gradients,
    grpo_gradients,
    gspo_gradients,
    mixed_gradients,
    ppo_gradients,
    reinforce_baseline_gradients,
    reinforce_pp_gradients,
    rloo_gradients,
    verifree_gradients,
)


@pytest.fixture
def off_policy(batch, model):
    """The batch as another policy's: ratios on both sides of the clip, and values far from and near to the critic's."""
    plain, generator = Plain(model, None), torch.Generator().manual_seed(5)
    logprobs = torch.zeros_like(batch.logprobs)
    for row, pattern in enumerate(ACTIONS):
        t = [t for t, c in enumerate(pattern) if c == "a"]
        logprobs[row, t] = plain.episode(batch.tokens[row], t)[0].detach().float()
    noise = torch.randn(logprobs.shape, generator=generator) * 0.4 * batch.action_mask
    values = torch.randn(logprobs.shape, generator=generator) * 0.7 * batch.action_mask
    cut_off = torch.tensor([False, False, False, True])
    return replace(batch, logprobs=logprobs + noise, values=values, cut_off=cut_off)


@pytest.mark.parametrize(
    ("micro_batch_size", "mini_batch_size", "chunk"), [(4, 4, 128), (4, 4, 3), (1, 4, 128), (2, 2, 2)]
)
@pytest.mark.parametrize(
    ("algorithm", "formula", "extra_settings"),
    [
        ("ppo", ppo_gradients, {}),
        ("grpo", grpo_gradients, {}),
        ("dr-grpo", dr_grpo_gradients, {"kl_estimator": "k2"}),
        ("dapo", dapo_gradients, {"kl_estimator": "k2", "overlong_cache": 0.5, "overlong_penalty": 0.7}),
        # A whole episode's ratio differs from 1 by less.
        ("gspo", gspo_gradients, {"kl_estimator": "k2", "clip_low": 0.05, "clip_high": 0.1, "old_logprobs": "sampler"}),
        ("rloo", rloo_gradients, {}),
        ("reinforce++", reinforce_pp_gradients, {}),
        ("reinforce++-baseline", reinforce_baseline_gradients, {}),
        ("dgpo", dgpo_gradients, {"kl_estimator": "k2", "teacher_weight": 0.3}),
    ],
)
def test_every_parameter_gets_the_gradient_of_the_formula(
    setup, model, off_policy, algorithm, formula, extra_settings, micro_batch_size, mini_batch_size, chunk
):
    sizes = {"micro_batch_size": micro_batch_size, "mini_batch_size": mini_batch_size, "lengths": LENGTHS}
    harness = setup(algorithm, **{**SETTINGS, **sizes, **extra_settings})
    learner = harness.learner
    learner.temperature = TEMPERATURE
    learner.grant.memory = replace(learner.grant.memory, loss_chunk=chunk)
    if learner.algorithm.has_teacher:
        off_policy = taught(off_policy, [1, 2])
    measured = learner.learn(off_policy, "seed")
    plain = Plain(model, learner.value_head)
    steps = off_policy.mini_batches(mini_batch_size, "seed/0", learner.algorithm.has_groups)
    expected = formula(learner.settings, plain, off_policy, steps)
    assert len(harness.steps) == len(expected) == 4 // mini_batch_size
    for got, step in zip(harness.steps, expected):
        for part, wanted in zip(got.split([p.numel() for p in plain.parameters]), step, strict=True):
            wanted = wanted.flatten().float()
            assert wanted.norm() > 0 and (part - wanted).norm() <= 1e-4 * wanted.norm()
    # The clip cuts the gradient on either side, and outside of it some have theirs.
    for side in ("low", "high"):
        assert 0.05 < measured[f"clip_ratio/{side}_mean"] < 0.4
    assert measured["sampling/outside_clip_first_epoch"] > sum(
        measured[f"clip_ratio/{s}_mean"] for s in ("low", "high")
    )


@pytest.mark.parametrize(("micro_batch_size", "mini_batch_size", "chunk"), [(4, 2, 128), (1, 2, 2), (2, 1, 3)])
@pytest.mark.parametrize("teacher", [True, False])
@pytest.mark.parametrize("algorithm", ["luffy", "exgrpo", "hybrid"])
def test_off_policy_episodes_get_the_gradient_of_the_shaped_ratio(
    setup, model, off_policy, algorithm, teacher, micro_batch_size, mini_batch_size, chunk
):
    """A teacher's probabilities are taken to be 1; those of replayed tokens are the recorded ones."""
    off = torch.tensor([False, True, False, True])
    logprobs = torch.where(off[:, None], 0.0, off_policy.logprobs) if teacher else off_policy.logprobs
    batch = replace(off_policy, off_policy=off, logprobs=logprobs)
    sizes = {"micro_batch_size": micro_batch_size, "mini_batch_size": mini_batch_size, "lengths": LENGTHS}
    harness = setup(algorithm, **{**SETTINGS, **sizes, "kl_estimator": "k2", "shaping_gamma": 0.2})
    learner = harness.learner
    learner.temperature = TEMPERATURE
    learner.grant.memory = replace(learner.grant.memory, loss_chunk=chunk)
    measured = learner.learn(batch, "seed")
    plain = Plain(model, None)
    steps = batch.mini_batches(mini_batch_size, "seed/0", learner.algorithm.has_groups)
    assert sorted(map(sorted, steps)) == ([[0, 1, 2, 3]] if mini_batch_size == 2 else [[0, 1], [2, 3]])
    for got, step in zip(harness.steps, mixed_gradients(learner.settings, plain, batch, steps), strict=True):
        for part, wanted in zip(got.split([p.numel() for p in plain.parameters]), step, strict=True):
            wanted = wanted.flatten().float()
            assert wanted.norm() > 0 and (part - wanted).norm() <= 1e-4 * wanted.norm()
    # Metrics of the policy's own tokens are of these alone; the teacher's ratios would be far outside the clip.
    count = sum(len(AT[row]) for row in (0, 2))
    low, high = (measured[f"clip_ratio/{side}_mean"] * count for side in ("low", "high"))
    assert low == pytest.approx(round(low)) and high == pytest.approx(round(high)) and low + high > 0
    with torch.no_grad():
        at = [plain.episode(batch.tokens[row], AT[row]) for row in range(4)]
    assert measured["entropy"] == pytest.approx(float(torch.cat([at[0][1], at[2][1]]).mean()), rel=1e-4)
    f = torch.cat([(w := (at[r][0] - batch.logprobs[r, AT[r]]).exp()) / (w + 0.2) for r in (1, 3)]).mean()
    assert measured["off_policy/shaped_ratio"] == pytest.approx(float(f), rel=1e-4)
    assert measured["off_policy/logp"] == pytest.approx(float(torch.cat([at[1][0], at[3][0]]).mean()), rel=1e-4)
    assert measured["off_policy/token_share"] == pytest.approx(1 - count / sum(map(len, AT)))
    ratios = torch.cat([(at[r][0] - batch.logprobs[r, AT[r]]).abs() for r in steps[0] if r in (0, 2)])
    assert measured["sampling/sampling_logp_difference/mean"] == pytest.approx(float(ratios.mean()), rel=1e-3)


@pytest.mark.parametrize("algorithm", ["luffy", "exgrpo", "hybrid"])
def test_without_off_policy_episodes_it_is_grpo_to_the_bit(gradients, off_policy, algorithm):
    """And with them it is not: nothing that GRPO's clip would cut off has no gradient."""
    settings = {"kl_beta": 0.05, "entropy_coefficient": 0.02}
    (grpo,), (got,) = gradients(off_policy, "grpo", **settings)[0], gradients(off_policy, algorithm, **settings)[0]
    assert torch.equal(grpo, got) and grpo.norm() > 0
    mixed = replace(off_policy, off_policy=torch.tensor([False, True, False, True]))
    assert (gradients(mixed, algorithm, **settings)[0][0] - grpo).norm() > 0.05 * grpo.norm()


@pytest.mark.parametrize(("micro_batch_size", "chunk"), [(4, 128), (1, 128), (2, 3)])
def test_analyses_and_right_answers_get_the_gradient_of_the_mean_likelihood(
    setup, model, off_policy, micro_batch_size, chunk
):
    """All four rows are of one group. The likelihoods are above 0, so only the worse analysis has a negative one."""
    batch = replace(
        off_policy,
        groups=torch.zeros(4, dtype=torch.long),
        off_policy=torch.tensor([False, False, True, True]),
        rewards=off_policy.rewards.abs(),
    )
    sizes = {"micro_batch_size": micro_batch_size, "mini_batch_size": 4, "lengths": LENGTHS}
    harness = setup("verifree", **{**SETTINGS, **sizes, "kl_estimator": "k2"})
    learner = harness.learner
    learner.temperature = TEMPERATURE
    learner.grant.memory = replace(learner.grant.memory, loss_chunk=chunk)
    measured = learner.learn(batch, "seed")
    plain = Plain(model, None)
    (expected,) = verifree_gradients(learner.settings, plain, batch, [[0, 1, 2, 3]])
    (gradient,) = harness.steps
    for part, of_formula in zip(gradient.split([p.numel() for p in plain.parameters]), expected, strict=True):
        of_formula = of_formula.flatten().float()
        assert of_formula.norm() > 0
        assert (part - of_formula).norm() <= 1e-4 * of_formula.norm()
    with torch.no_grad():
        entropies = torch.cat([plain.episode(batch.tokens[row], AT[row])[1] for row in (0, 1)])
    assert measured["entropy"] == pytest.approx(float(entropies.mean()), rel=1e-4)  # of the analyses alone


@pytest.mark.parametrize("micro_batch_size", [4, 1])
@pytest.mark.parametrize(
    ("groups", "paid", "pair_count"),
    [
        ([0, 0, 0, 0], [1.0, 0.0, 0.5, 0.5], 5),  # two episodes are equal: no pair
        ([0, 0, 1, 1], [1.0, 0.0, 0.0, 0.5], 2),
        ([0, 0, 1, 1], [1.0, 0.0, 0.5, 0.5], 1),  # a group without a pair
    ],
)
def test_pairs_get_the_gradient_of_dpo(setup, model, batch, groups, paid, pair_count, micro_batch_size):
    """In a round's first step, where the policy is the one that sampled."""
    plain = Plain(model, None)
    logprobs = torch.zeros_like(batch.logprobs)
    for row, t in enumerate(AT):
        logprobs[row, t] = plain.episode(batch.tokens[row], t)[0].detach().float()
    rewards = torch.zeros_like(batch.rewards)
    rewards[:, 2] = torch.tensor(paid)  # an action token of every row
    batch = replace(batch, logprobs=logprobs, rewards=rewards, groups=torch.tensor(groups))
    harness = setup("dpo", kl_beta=0.7, likelihood_weight=0.3, micro_batch_size=micro_batch_size)
    harness.learner.temperature = TEMPERATURE
    measured = harness.learner.learn(batch, "seed")
    expected = torch.cat([part.flatten().float() for part in dpo_gradient(harness.learner.settings, plain, batch)])
    (gradient,) = harness.steps
    assert expected.norm() > 0 and (gradient - expected).norm() <= 1e-4 * expected.norm()
    log_ratios = [
        float((logprobs[row, t] - plain.episode(batch.tokens[row], t, "reference")[0].detach()).sum())
        for row, t in enumerate(AT)
    ]
    pairs = [(i, j) for i in range(4) for j in range(4) if groups[i] == groups[j] and paid[i] > paid[j]]
    margins = [0.7 * (log_ratios[better] - log_ratios[worse]) for better, worse in pairs]
    assert len(pairs) == pair_count
    assert measured["rewards/margins"] == pytest.approx(sum(margins) / pair_count, rel=1e-3)
    assert measured["rewards/accuracies"] == pytest.approx(sum(h > 0 for h in margins) / pair_count)
