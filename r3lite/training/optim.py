"""AdamW over named parameters, its learning-rate schedule, and its state as plain tensors.

Knows no model. The schedule is a function of the step's number alone, so a resumed run needs no scheduler state.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from r3lite.training.adamw8 import AdamW8
from r3lite.training.uncompiled import UncompiledAdamW

STATE_NAMES = ("step", "exp_avg", "exp_avg_sq")  # what AdamW has for each parameter: step count, two moments


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with the same peak learning rate. Their names are unique in the run."""

    parameters: dict[str, nn.Parameter]
    learning_rate: float  # the peak
    is_policy: bool = True  # False: a critic, whose learning rate --kl-budget does not scale


def adamw(groups: list[ParameterGroup], weight_decay: float) -> torch.optim.AdamW:
    """Returns AdamW (arXiv 1711.05101). Except on MPS it has the fused kernel, which makes no copies of the moments."""
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
    return UncompiledAdamW(param_groups, weight_decay=weight_decay, fused=fused)


def parameters(optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Returns every parameter of an optimizer by name. The optimizer is an AdamW8, or `adamw` made it."""
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
    """Returns the learning rate of a step from 1 to `total`, as a share of the peak.

    `warmup` is a share of the steps. With w = min(ceil(warmup * total), total - 1) steps of warm-up, the share rises
    linearly: it is k / (w + 1) in step k <= w, and 1 in step w + 1. From there on it falls by a cosine or a line. It
    would be `floor` one step after the last, so even with floor 0 it is above 0 in all steps. With the schedule
    "constant", the floor must be 1.
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
    """Returns the state as tensors by `<parameter>.<state name>`; a parameter that was never updated has none."""
    tensors = {}
    for name, parameter in parameters(optimizer).items():
        for state_name, tensor in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}.{state_name}"] = tensor
    return tensors


def load_state_tensors(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Restores the state that `state_tensors` returned; for AdamW8, removes it from `tensors`."""
    if isinstance(optimizer, AdamW8):  # the load_state_dict of PyTorch would convert the uint8 codes to floats
        _load_adamw8(optimizer, tensors)
        return
    state = optimizer.state_dict()
    state["state"] = {}
    for i, name in enumerate(parameters(optimizer)):
        if f"{name}.step" in tensors:
            state["state"][i] = {state_name: tensors[f"{name}.{state_name}"] for state_name in STATE_NAMES}
    optimizer.load_state_dict(state)


def _load_adamw8(optimizer: AdamW8, tensors: dict[str, Tensor]) -> None:
    """Moves the state of each parameter from `tensors` to the parameter's device, one parameter at a time."""
    for name, parameter in parameters(optimizer).items():
        keys = [key for key in tensors if key.rpartition(".")[0] == name]
        state = {}
        for key in keys:
            state_name = key.rpartition(".")[2]
            state[state_name] = tensors.pop(key).to(parameter.device, copy=True)
        optimizer.state[parameter] = state
