"""AdamW over named parameters, its learning-rate schedule, and its state as plain tensors.

Knows no model. The schedule is a function of the step alone, so that a resumed run needs no scheduler state.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from r3lite.training.adamw8 import AdamW8

MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what AdamW keeps for each parameter


@dataclass(frozen=True)
class Group:
    """Parameters with one peak learning rate, by names that are unique in the run."""

    parameters: dict[str, nn.Parameter]
    learning_rate: float
    is_policy: bool = True  # and not a critic, whose rate no --kl-budget scales


def adamw(groups: list[Group], weight_decay: float) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101). The fused kernel, which MPS lacks, makes no temporary copies of the moments."""
    described = [
        {
            "params": list(g.parameters.items()),
            "lr": g.learning_rate,
            "peak_lr": g.learning_rate,
            "is_policy": g.is_policy,
        }
        for g in groups
    ]
    fused = all(p.device.type in ("cuda", "cpu") for g in groups for p in g.parameters.values())
    return torch.optim.AdamW(described, weight_decay=weight_decay, fused=fused)


def parameters(optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Every parameter of an optimizer that `adamw` made, by name."""
    return {n: p for g in optimizer.param_groups for n, p in zip(g["param_names"], g["params"], strict=True)}


def rate(step: int, total: int, warmup: float, floor: float, schedule: str = "cosine") -> float:
    """Learning rate of step 1..total as a share of the peak: linear warm-up, then a cosine or a line towards `floor`.

    With w = ceil(warmup * total) steps of warm-up, step k <= w has k / (w + 1); step w + 1 has the whole peak, and
    `floor` would be reached one step after the last, so that no step is without effect even at floor 0. With schedule
    "constant", the floor is 1.
    """
    assert 1 <= step <= total, (step, total)
    w = min(math.ceil(warmup * total), total - 1)
    if step <= w:
        return step / (w + 1)
    assert schedule != "constant" or floor == 1
    if schedule == "linear":
        return floor + (1 - floor) * (1 - (step - 1 - w) / (total - w))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * (step - 1 - w) / (total - w)))


def set_rate(optimizer: torch.optim.Optimizer, share: float) -> None:
    """Sets each group's learning rate to `share` times its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * share


def current_rate(optimizer: torch.optim.Optimizer) -> float:
    """The learning rate of the first group."""
    return optimizer.param_groups[0]["lr"]


def state_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The moments as `<parameter>.<moment>`; a parameter that was never updated has none."""
    return {
        f"{name}.{moment}": optimizer.state[parameter][moment]
        for name, parameter in parameters(optimizer).items()
        for moment in optimizer.state.get(parameter, ())
    }


def load_state_tensors(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """The inverse of `state_tensors`."""
    if isinstance(optimizer, AdamW8):  # PyTorch would convert its uint8 codes to floats
        for name, parameter in parameters(optimizer).items():
            found = {key.rpartition(".")[2]: key for key in tensors if key.rpartition(".")[0] == name}
            optimizer.state[parameter] = {
                moment: tensors.pop(key).to(parameter.device, copy=True) for moment, key in found.items()
            }
        return
    state = optimizer.state_dict()
    state["state"] = {
        i: {moment: tensors[f"{name}.{moment}"] for moment in MOMENTS}
        for i, name in enumerate(parameters(optimizer))
        if f"{name}.step" in tensors
    }
    optimizer.load_state_dict(state)
