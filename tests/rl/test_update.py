"""A round's learning on a small model: what carries gradient, and that batching changes nothing."""

import copy
import dataclasses

import pytest
import torch

from r3lite.models import lora
from r3lite.models.value_head import ValueHead
from r3lite.rl.batch import Batch, Rollout
from r3lite.rl.policy import action_logprobs
from r3lite.rl.update import Learner
from r3lite.settings import RLSettings

# Two rollouts for each of two questions, with retrieved tokens (the gaps) and of different lengths.
ACTIONS = ["..aa..aaa", "..aaa.aa", "..a....aaaa", "..aaaaa"]
PAID = [1.0, 0.2, 0.5, 0.0]


@pytest.fixture
def model(small_model):
    model = small_model().train()
    for name, seed in (("policy", 1), ("reference", 2)):
        lora.add_adapter(model, name, r=4, alpha=8, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        for key, p in lora.adapter_parameters(model, name).items():
            if "lora_B" in key:  # else the adapters would change nothing
                p.data.normal_(0, 0.05, generator=generator)
    for p in lora.adapter_parameters(model, "reference").values():
        p.requires_grad_(False)
    lora.set_adapter(model, "policy")
    return model


def rollouts(model, vocabulary=290):
    """Random tokens with the log-probs that the model gives them, as an on-policy sampler would record."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for i, (pattern, paid) in enumerate(zip(ACTIONS, PAID)):
        action = [c == "a" for c in pattern]
        tokens = torch.randint(0, vocabulary, (len(action),), generator=generator).tolist()
        ends = [t for t in range(len(action)) if action[t] and action[t + 1 : t + 2] != [True]]
        rewards = [(end, 0.1) for end in ends] + [(ends[-1], paid)]
        made.append(Rollout(tokens, action, [0.0] * len(action), [0.3 * a for a in action], rewards, i // 2))
    batch = Batch.of(made)
    with torch.no_grad():
        batch.logprobs.masked_scatter_(batch.action, action_logprobs(model, batch, vocabulary, 1.0))
    return batch


def learner(model, steps, **settings):
    """A learner whose optimizer step only notes the gradients that it would have used."""
    settings = RLSettings(**({"kl_beta": 0.05, "mini_batch_size": 4, "micro_batch_size": 4} | settings))
    head = ValueHead(64) if settings.algorithm == "ppo" else None
    if head is not None:
        torch.manual_seed(3)
        head.weight.data.normal_(0, 0.1)
    parameters = list(lora.adapter_parameters(model, "policy").values()) + (list(head.parameters()) if head else [])

    def optimizer_step():
        steps.append(torch.cat([p.grad.flatten() for p in parameters]))
        for p in parameters:
            p.grad = None
        return float(steps[-1].norm()), False

    return Learner(model, 290, 1.0, settings, "reference", lambda loss: loss.backward(), optimizer_step, head)


def gradients(model, batch, **settings):
    steps = []
    measured = learner(model, steps, **settings).learn(batch, "seed")
    return steps, measured


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_observations_carry_nothing(model, algorithm):
    """Retrieved tokens were once masked in the policy loss alone, and still steered GAE, whitening and the critic."""
    batch = rollouts(model)
    (expected,), measured = gradients(model, batch, algorithm=algorithm)
    noisy = copy.deepcopy(batch)
    for x in (noisy.values, noisy.logprobs):
        x += torch.randn(x.shape) * 10 * ~noisy.action
    if algorithm == "ppo":  # GRPO's return is the sum of what was paid, which is paid at actions alone
        noisy.rewards += torch.randn(noisy.rewards.shape) * 10 * ~noisy.action
        noisy = dataclasses.replace(noisy, rewards=noisy.rewards)
    (got,), again = gradients(model, noisy, algorithm=algorithm)
    assert torch.equal(got, expected) and expected.norm() > 0
    same = {"loss", "kl", "entropy", "grad_norm"} & measured.keys()
    assert {k: measured[k] for k in same} == {k: again[k] for k in same}


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_micro_batches_change_nothing(model, algorithm):
    """Denominators are those of the mini-batch: splitting it gives the same gradient."""
    batch = rollouts(model)
    (whole,), measured = gradients(model, batch, algorithm=algorithm)
    (split,), again = gradients(model, batch, algorithm=algorithm, micro_batch_size=1)
    assert torch.allclose(whole, split, atol=1e-6)
    assert all(measured[k] == pytest.approx(again[k], abs=1e-5) for k in measured)


def test_grpo_gradient_equals_the_formula(model):
    """Against the loss written out in one expression, episode by episode, on-policy: ratio 1."""
    batch = rollouts(model)
    (got,), _ = gradients(model, batch, algorithm="grpo", kl_beta=0.05)
    with torch.no_grad(), lora.use_adapter(model, "reference"):
        reference = action_logprobs(model, batch, 290, 1.0)
    logprobs = action_logprobs(model, batch, 290, 1.0)
    returns = batch.rewards.sum(-1)
    loss, at = 0.0, 0
    for i, count in enumerate(batch.action.sum(-1).tolist()):
        pair = returns[i // 2 * 2 : i // 2 * 2 + 2]
        advantage = (returns[i] - pair.mean()) / (pair.std() + 1e-4)
        rows = slice(at, at + count)
        d = reference[rows] - logprobs[rows]
        ratio = (logprobs[rows] - logprobs[rows].detach()).exp()
        loss = loss - (ratio * advantage - 0.05 * (d.exp() - d - 1)).mean() / 4
        at += count
    parameters = list(lora.adapter_parameters(model, "policy").values())
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
    assert torch.allclose(got, expected, atol=1e-6)


def test_ppo_pays_the_kl_as_a_penalty_on_every_action(model):
    batch = rollouts(model)
    one = learner(model, [], algorithm="ppo", kl_beta=0.5)
    reference = one.reference_logprobs(batch)
    _, with_kl = one.advantages(batch, batch.rewards.sum(-1), reference)
    penalized = dataclasses.replace(batch, rewards=batch.rewards - 0.5 * (batch.logprobs - reference) * batch.action)
    _, by_hand = one.advantages(penalized, batch.rewards.sum(-1), None)
    assert torch.allclose(with_kl, by_hand) and (reference - batch.logprobs)[batch.action].abs().max() > 0.01
    assert not reference[~batch.action].any()


def test_several_epochs_and_mini_batches_take_that_many_steps(model):
    batch = rollouts(model)
    steps, measured = gradients(model, batch, algorithm="ppo", update_epochs=3, mini_batch_size=2)
    assert len(steps) == 6 and measured["clip_ratio/high_mean"] == 0  # nothing was updated, so nothing moved


def test_equal_returns_teach_grpo_nothing(model):
    """What rounding left of r - mean(r) did, for AdamW knows no scale: full steps away from what was well-formed."""
    batch = rollouts(model)
    batch.rewards = 0.1 * batch.action / batch.action.sum(-1, keepdim=True)
    (got,), measured = gradients(model, batch, algorithm="grpo", kl_beta=0.0)
    assert got.norm() == 0 and measured["frac_reward_zero_std"] == 1.0


def test_groups_are_learned_from_together_in_grpo(model):
    batch = rollouts(model)
    groups = batch.groups.tolist()
    for algorithm, together in (("grpo", True), ("ppo", False)):
        teacher = learner(model, [], algorithm=algorithm, mini_batch_size=groups.count(0))
        orders = [teacher._mini_batches(batch, str(seed)) for seed in range(20)]
        assert all(sorted(i for rows in order for i in rows) == list(range(len(groups))) for order in orders)
        assert len({str(order) for order in orders}) > 1
        assert all(len({groups[i] for i in rows}) == 1 for order in orders for rows in order) == together


def test_negative_advantages_can_weigh_less(model):
    """With scale 0 only what was better than expected teaches: the same gradient as with those episodes alone."""
    batch = rollouts(model)
    (got,), _ = gradients(model, batch, algorithm="grpo", kl_beta=0.0, negative_advantage_scale=0.0)
    advantages, _ = learner(model, [], algorithm="grpo").advantages(batch, batch.rewards.sum(-1), None)
    better = advantages.sum(-1) > 0
    assert better.tolist() == [True, False, True, False]
    logprobs = action_logprobs(model, batch, 290, 1.0)
    share = batch.action / batch.action.sum(-1, keepdim=True) / 4 * better[:, None]
    loss = -((logprobs - logprobs.detach()).exp() * (advantages * share)[batch.action]).sum()
    parameters = list(lora.adapter_parameters(model, "policy").values())
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
    assert torch.allclose(got, expected, atol=1e-6) and got.norm() > 0
