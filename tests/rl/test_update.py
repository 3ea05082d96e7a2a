"""A real update: clipping over all parameters together and AdamW, against both by hand, in float64."""

from pathlib import Path

import pytest
import torch

from r3lite.models import lora
from r3lite.training import optim
from r3lite.training.state import TrainState

RATES, DECAY, BETAS, EPS = (1e-2, 5e-2), 0.1, (0.9, 0.999), 1e-8
STEPS = 3


def adamw(groups: list[list[torch.Tensor]], gradients: list[list[list[torch.Tensor]]], clip) -> list[torch.Tensor]:
    """The parameters after steps with these gradients, which `clip` shortens (arXiv 1711.05101, algorithm 2)."""
    parameters = [[p.double() for p in group] for group in groups]
    first, second = ([[torch.zeros_like(p) for p in group] for group in parameters] for _ in range(2))
    for t, step in enumerate(gradients, start=1):
        for g, group in enumerate(clip(step)):
            for i, gradient in enumerate(group):
                first[g][i] = BETAS[0] * first[g][i] + (1 - BETAS[0]) * gradient
                second[g][i] = BETAS[1] * second[g][i] + (1 - BETAS[1]) * gradient**2
                mean, spread = first[g][i] / (1 - BETAS[0] ** t), second[g][i] / (1 - BETAS[1] ** t)
                parameters[g][i] = parameters[g][i] * (1 - RATES[g] * DECAY) - RATES[g] * mean / (spread.sqrt() + EPS)
    return [p for group in parameters for p in group]


def norm(gradients) -> float:
    return float(torch.cat([x.flatten() for x in gradients]).norm())


def together(limit: float):
    """Clips all parameters by one factor."""

    def clip(step):
        factor = min(1.0, limit / norm([x for group in step for x in group]))
        return [[factor * x for x in group] for group in step]

    return clip


def by_group(limit: float):
    """Clips each group by itself, which is wrong."""
    return lambda step: [together(limit)([group])[0] for group in step]


@pytest.mark.parametrize("limit", [0.5, 2.0])
def test_a_round_takes_clipped_steps(batch, setup, model, limit):
    """Several, since AdamW's first step is of one size whatever the gradient's: what was clipped shows in the next."""
    harness = setup("ppo", update_epochs=STEPS, kl_beta=0.0)
    learner = harness.learner
    gradients = []
    named = [lora.adapter_parameters(model, "policy"), dict(learner.value_head.named_parameters())]
    optimizer = optim.adamw([optim.ParameterGroup(p, rate) for p, rate in zip(named, RATES, strict=True)], DECAY)
    state = TrainState(optimizer, learner.precision, max_grad_norm=limit, save_adapter=Path.mkdir)
    parameters_before = [[p.detach().clone() for p in group.values()] for group in named]

    def update():
        gradients.append([[p.grad.double() for p in group.values()] for group in named])
        return state.update()

    learner.optimizer_step = update
    measured = learner.learn(batch, "seed")
    norms = [norm([x for group in step for x in group]) for step in gradients]
    assert len(norms) == STEPS and measured["grad_norm"] == pytest.approx(sum(norms) / STEPS, rel=1e-5)
    parameters_after = torch.cat([p.detach().flatten().double() for group in named for p in group.values()])

    def off(clip) -> float:
        """Largest difference from what steps with gradients clipped so would have given."""
        expected = adamw(parameters_before, gradients, clip)
        return float((parameters_after - torch.cat([p.flatten() for p in expected])).abs().max())

    assert min(norms) < limit < max(norms)  # one is shortened, and one is not
    assert off(together(limit)) < 1e-6
    assert off(by_group(limit)) > 1e-2 and off(lambda step: step) > 1e-2
