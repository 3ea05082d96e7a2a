"""The schedule and AdamW against numbers worked by hand, and AdamW's state through plain tensors."""

import math
import subprocess
import sys

import pytest
import torch

from r3lite.training import optim


def test_the_schedule_by_hand():
    """Ten steps, two of warm-up, down towards 0.1: thirds of the peak, the peak, then cosine eighths."""
    rates = [optim.rate_share(k, 10, warmup=0.2, floor=0.1) for k in range(1, 11)]
    cosine = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * i / 8)) for i in range(8)]
    assert rates == pytest.approx([1 / 3, 2 / 3, *cosine])
    assert rates[2] == 1
    assert rates[6] == pytest.approx(0.55)  # halfway


def test_a_line_by_hand():
    """Ten steps, two of warm-up, down towards 0.2: thirds of the peak, then from 1 in eighths of 0.8."""
    rates = [optim.rate_share(k, 10, 0.2, 0.2, "linear") for k in range(1, 11)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3])


def test_a_constant_rate_is_the_peak_after_the_warm_up():
    assert [optim.rate_share(k, 4, 0.25, 1.0, "constant") for k in range(1, 5)] == [0.5, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize("total", [1, 2, 3, 100])
@pytest.mark.parametrize("warmup", [0.0, 0.03, 0.5, 1.0])
def test_no_step_is_without_effect(total, warmup, schedule):
    rates = [optim.rate_share(k, total, warmup, 0.0, schedule) for k in range(1, total + 1)]
    assert all(0 < r <= 1 for r in rates)
    assert max(rates) == 1


def test_a_floor_of_one_is_constant_after_the_warm_up():
    assert [optim.rate_share(k, 6, 0.3, 1.0) for k in range(1, 7)] == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1])


def two_groups():
    policy, value = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))
    return optim.adamw(
        [optim.ParameterGroup({"a": policy}, 1e-2), optim.ParameterGroup({"v": value}, 1e-1)], weight_decay=0.0
    )


def backward(optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sum((p * torch.randn(p.shape, generator=generator)).sum() for p in optim.parameters(optimizer).values()).backward()


def test_adamw_by_hand_in_groups_of_their_own_rate():
    """AdamW's first step is the learning rate times the sign of the gradient, whatever the gradient's size."""
    optimizer = two_groups()
    optim.set_rate(optimizer, 0.5)
    assert optim.current_rate(optimizer) == 0.005
    a, v = optim.parameters(optimizer).values()
    (a * torch.tensor([1e-3, -5.0, 7.0])).sum().add((v * torch.tensor([2.0, -2.0])).sum()).backward()
    optimizer.step()
    assert a.tolist() == pytest.approx([0.995, 1.005, 0.995], abs=1e-5)
    assert v.tolist() == pytest.approx([0.95, 1.05], abs=1e-5)


def test_its_state_goes_through_tensors_to_the_bit():
    first, second = two_groups(), two_groups()
    assert optim.state_tensors(first) == {}
    for seed in range(3):
        backward(first, seed)
        first.step()
        first.zero_grad()
    tensors = {k: t.clone() for k, t in optim.state_tensors(first).items()}
    assert set(tensors) == {f"{name}.{moment}" for name in "av" for moment in optim.STATE_NAMES}
    with torch.no_grad():
        for name, parameter in optim.parameters(second).items():
            parameter.copy_(optim.parameters(first)[name])
    optim.load_state_tensors(second, tensors)
    for optimizer in (first, second):
        backward(optimizer, 9)
        optimizer.step()
    for name, parameter in optim.parameters(first).items():
        assert torch.equal(parameter, optim.parameters(second)[name])
        assert torch.equal(
            first.state[parameter]["exp_avg_sq"], second.state[optim.parameters(second)[name]]["exp_avg_sq"]
        )


def test_its_steps_are_those_of_adamw_to_the_bit():
    ours = two_groups()
    copies = [parameter.detach().clone().requires_grad_() for parameter in optim.parameters(ours).values()]
    settings = {name: ours.defaults[name] for name in ("weight_decay", "fused")}
    groups = [{"params": [copy], "lr": group["lr"]} for copy, group in zip(copies, ours.param_groups, strict=True)]
    reference = torch.optim.AdamW(groups, **settings)
    for seed in range(4):
        backward(ours, seed)
        for copy, parameter in zip(copies, optim.parameters(ours).values(), strict=True):
            copy.grad = parameter.grad.clone()
        for optimizer in (ours, reference):
            optimizer.step()
            optimizer.zero_grad()
    for copy, parameter in zip(copies, optim.parameters(ours).values(), strict=True):
        assert torch.equal(copy, parameter) and parameter.grad is None


def test_optimizers_import_no_compiler():
    """Every run of `sft` and `ppo` imported PyTorch's compiler, which takes a second and 80 MiB."""
    code = """
import sys, torch
from r3lite.training import adamw8, optim
weight = torch.nn.Parameter(torch.ones(4, 4))
weight.grad = torch.ones(4, 4)
full = optim.adamw([optim.ParameterGroup({"weight": weight}, 0.1)], 0.0)
full.step()
small = adamw8.AdamW8({"weight": weight}, 0.1, weight_decay=0.0, max_norm=1.0, seed=0)
small.update(weight, torch.ones(4, 4))
small.end_step()
for optimizer in (full, small):
    optimizer.zero_grad()
    tensors = optim.state_tensors(optimizer)
    assert tensors
    optim.load_state_tensors(optimizer, tensors)
assert 'torch._dynamo' not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
