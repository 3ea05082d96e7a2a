"""DGPO: the divergence from a teacher by hand, when it is GRPO, and what stands in the place of a failed episode."""

import math
from dataclasses import replace

import pytest
import torch

from r3lite.models.logprobs import TopTokens, top_logprobs
from r3lite.models.packing import states_before
from r3lite.rl import losses
from r3lite.rl.algorithms import ALGORITHMS
from r3lite.rl.batch import Batch
from r3lite.settings import LengthSettings
from tests.rl.algorithms.test_variants import rollout
from tests.rl.conftest import ACTIONS, VOCABULARY, moved, paper, taught


def test_the_divergence_by_hand():
    """Of two tokens p = 1/2 and 1/4, q = 1/4 and 1/4; the others together have 1/4 and 1/2:
    1/2 log 2 + 0 + 1/4 log 1/2 = 1/4 log 2. The second row's distributions are equal, the third's p is certain."""
    teacher = torch.tensor([[0.5, 0.25], [0.5, 0.25], [1.0, 1e-30]]).log()
    policy = torch.tensor([[0.25, 0.25], [0.5, 0.25], [0.5, 0.25]]).log()
    expected = torch.tensor([math.log(2) / 4, 0.0, math.log(2)])
    assert torch.allclose(losses.truncated_kl(teacher, policy), expected, atol=2e-5)  # MIN_REMAINDER


def test_all_tokens_give_the_whole_divergence_and_fewer_never_more():
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(20, 50, generator=generator).mul(2).log_softmax(-1) for _ in range(2))
    full_kl = (p.exp() * (p - q)).sum(-1)
    assert torch.allclose(losses.truncated_kl(p, q), full_kl, atol=1e-4)
    last = full_kl
    for k in (30, 10, 1):
        likeliest = p.topk(k).indices
        kl = losses.truncated_kl(p.gather(-1, likeliest), q.gather(-1, likeliest))
        assert (kl > 0).all() and (kl <= last + 1e-4).all()
        last = kl


def test_the_loss_and_what_is_told():
    dgpo = ALGORITHMS["dgpo"](paper("dgpo", teacher_weight=0.5), LengthSettings())
    teacher, policy = torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.25, 0.25]]).log()
    loss, metrics = dgpo.guided_loss(teacher, policy)
    assert loss.item() == pytest.approx(math.log(2) / 8)
    assert metrics["teacher/kl"].item() == pytest.approx(math.log(2) / 4)
    one = TopTokens(torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 2))
    rollouts = [replace(rollout(2, 0.0), failed=True, teacher=one), replace(rollout(2, 0.1), failed=True)]
    batch = Batch.of([*rollouts, rollout(2, 1.0), rollout(2, 1.0)])
    statistics = dgpo.statistics(batch)
    assert (statistics["teacher/failed"], statistics["teacher/guided"]) == (0.5, 0.25)
    # Failed episodes are what the others are compared with: rewards 0, 0.1, 1, 1.
    grpo = ALGORITHMS["grpo"](paper("grpo"), LengthSettings())
    assert torch.equal(dgpo.with_advantages(batch).advantages, grpo.with_advantages(batch).advantages)


@pytest.mark.parametrize("sizes", [{}, {"mini_batch_size": 2, "micro_batch_size": 1, "update_epochs": 2}])
def test_without_failures_it_is_grpo_to_the_bit(gradients, batch, sizes):
    (ours, dgpo_metrics), (theirs, grpo_metrics) = (gradients(moved(batch), name, **sizes) for name in ("dgpo", "grpo"))
    assert all(torch.equal(a, b) and a.norm() > 0 for a, b in zip(ours, theirs, strict=True)) and ours
    assert dgpo_metrics == grpo_metrics | {"teacher/failed": 0.0, "teacher/guided": 0.0}


def test_what_fails_without_a_word_of_the_teacher_is_grpo_too(gradients, batch):
    failed = replace(batch, failed=torch.ones(4, dtype=torch.bool))
    (ours, metrics), (theirs, _) = gradients(failed, "dgpo"), gradients(batch, "grpo")
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)) and ours[0].norm() > 0
    assert (metrics["teacher/failed"], metrics["teacher/guided"]) == (1, 0)


def test_in_a_round_that_failed_as_a_whole_only_the_teacher_speaks(gradients, batch):
    """Rewards, ratios and the weight of the KL to the reference have no say; nothing is divided by no tokens."""
    every = taught(batch, range(4))
    (ours, metrics), (unrewarded, _) = (
        gradients(replace(moved(every, size), rewards=paid), "dgpo", kl_target=0.1)
        for size, paid in ((0.4, every.rewards), (0.0, every.rewards * 0))
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, unrewarded, strict=True)) and ours[0].norm() > 0
    assert metrics["teacher/kl"] > 0 and "kl" not in metrics and "entropy" not in metrics
    assert "sampling/sampling_logp_difference/mean" not in metrics


def test_the_mean_of_the_divergence_is_over_the_teachers_tokens(gradients, batch):
    """Means of other metrics are over the other tokens: the entropy of two episodes is that of GRPO on these two."""
    guided = taught(batch, [2, 3])
    metrics = gradients(guided, "dgpo")[1]
    both = [gradients(guided.select(rows), "dgpo")[1] for rows in ([0, 1], [2, 3])]
    assert metrics["entropy"] == pytest.approx(both[0]["entropy"], rel=1e-5)
    assert metrics["teacher/kl"] == pytest.approx(both[1]["teacher/kl"], rel=1e-5)


@pytest.mark.parametrize(("micro", "parts"), [(1, 4), (2, 3)])
def test_how_the_rows_are_divided_changes_nothing(setup, batch, micro, parts):
    guided = taught(moved(batch), [1, 2, 3])
    full, split = (setup("dgpo", micro_batch_size=size) for size in (4, micro))
    assert [len(harness.learner.micro_batches(guided)) for harness in (full, split)] == [2, parts]
    for harness in (full, split):
        harness.learner.learn(guided, "seed")
    (full_gradient,), (split_gradient,) = full.steps, split.steps
    assert (full_gradient - split_gradient).norm() < 1e-5 * full_gradient.norm()


def test_rows_keep_what_is_said_of_them(batch, setup):
    guided = taught(batch, [1, 2])
    learner = setup("dgpo").learner
    assert [sorted(rows) for rows in learner.micro_batches(guided)] == [[0, 3], [1, 2]]
    for alike in (batch, taught(batch, range(4))):
        assert [sorted(rows) for rows in learner.micro_batches(alike)] == [[0, 1, 2, 3]]
    assert guided.select([0, 3]).teacher == [None, None]
    assert guided.select([3, 2]).teacher == [None, guided.teacher[2]]
    assert [top.ids.shape for top in guided.select([2, 1]).teacher] == [(ACTIONS[i].count("a"), 5) for i in (2, 1)]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a_teacher_that_is_the_policy_has_nothing_to_teach_at_any_temperature(setup, model, batch, temperature):
    """The teacher spoke at temperature 1 and the policy at --temperature: the divergence was .2 at .5."""
    rows = batch.token_rows()
    masks = [mask[: len(row)] for row, mask in zip(rows, batch.action_mask.tolist(), strict=True)]
    with torch.no_grad():
        hidden, _ = states_before(model, rows, masks)
        top_tokens = top_logprobs(hidden, model.head_weight[:VOCABULARY], VOCABULARY)
    self_taught = replace(batch, teacher=top_tokens.split([sum(mask) for mask in masks]))
    harness = setup("dgpo")
    harness.learner.temperature = temperature
    measured = harness.learner.learn(self_taught, "seed")
    assert measured["teacher/kl"] == pytest.approx(0, abs=1e-5) and harness.steps[0].norm() < 1e-4
