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
class ParameterGroup:
    """Parameters with one peak learning rate, by names that are unique in the run."""

    parameters: dict[str, nn.Parameter]
    learning_rate: float
    is_policy: bool = True  # False: a critic, whose learning rate --kl-budget does not scale


def adamw(groups: list[ParameterGroup], weight_decay: float) -> torch.optim.AdamW:
    """Returns AdamW (arXiv 1711.05101). The fused kernel, which MPS lacks, makes no temporary copies of the moments."""
    param_groups = []
    devices = set()
    for group in groups:
        param_groups.append(
            {
                "params": list(group.parameters.items()),
                "lr": group.learning_rate,
                "peak_lr": group.learning_rate,
                "is_policy": group.is_policy,
            }
        )
        devices |= {parameter.device.type for parameter in group.parameters.values()}
    fused = devices <= {"cuda", "cpu"}
    return torch.optim.AdamW(param_groups, weight_decay=weight_decay, fused=fused)


def parameters(optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Returns every parameter of an optimizer that `adamw` made, by name."""
    by_name = {}
    for group in optimizer.param_groups:
        by_name.update(zip(group["param_names"], group["params"], strict=True))
    return by_name


def rate_share(
    step: int,
    total: int,
    warmup: float,
    floor: float,
    schedule: str = "cosine",
) -> float:
    """Returns the learning rate of step 1..total as a share of the peak.

    It rises linearly in the warm-up, and then falls by a cosine or a line towards `floor`. With
    w = ceil(warmup * total) steps of warm-up, at most total - 1, step k <= w has k / (w + 1); step w + 1 has the whole
    peak, and `floor` would be reached one step after the last, so that no step is without effect even at floor 0. With
    schedule "constant", the floor must be 1.
    """
    assert 1 <= step <= total, (step, total)
    warmup_steps = min(math.ceil(warmup * total), total - 1)
    if step <= warmup_steps:
        return step / (warmup_steps + 1)
    assert schedule != "constant" or floor == 1
    steps_since_peak = step - 1 - warmup_steps
    steps_of_fall = total - warmup_steps
    if schedule == "linear":
        return floor + (1 - floor) * (1 - steps_since_peak / steps_of_fall)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * steps_since_peak / steps_of_fall))


def set_rate(optimizer: torch.optim.Optimizer, share: float) -> None:
    """Sets each group's learning rate to `share` times its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * share


def current_rate(optimizer: torch.optim.Optimizer) -> float:
    """Returns the learning rate of the first group."""
    return optimizer.param_groups[0]["lr"]


def state_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Returns the moments as `<parameter>.<moment>`; a parameter that was never updated has none."""
    tensors = {}
    for name, parameter in parameters(optimizer).items():
        for moment, tensor in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}.{moment}"] = tensor
    return tensors


def load_state_tensors(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Loads what `state_tensors` returned."""
    if isinstance(optimizer, AdamW8):  # PyTorch would convert its uint8 codes to floats
        _load_adamw8(optimizer, tensors)
        return
    state = optimizer.state_dict()
    state["state"] = {}
    for i, name in enumerate(parameters(optimizer)):
        if f"{name}.step" in tensors:
            state["state"][i] = {moment: tensors[f"{name}.{moment}"] for moment in MOMENTS}
    optimizer.load_state_dict(state)


def _load_adamw8(optimizer: AdamW8, tensors: dict[str, Tensor]) -> None:
    """Moves the tensors of each parameter to its device, one parameter at a time, and takes them out of `tensors`."""
    for name, parameter in parameters(optimizer).items():
        keys = [key for key in tensors if key.rpartition(".")[0] == name]
        moments = {}
        for key in keys:
            moment = key.rpartition(".")[2]
            moments[moment] = tensors.pop(key).to(parameter.device, copy=True)
        optimizer.state[parameter] = moments
