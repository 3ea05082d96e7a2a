"""The result of a check, and when log-probabilities are close enough."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from r3lite.devices.precision import dtype_name

# The largest mean differences allowed between log-probabilities that should be equal. Measured on a CPU: 1e-6 in fp32,
# 0.002 in fp16, 0.017 in bf16. A bug may change less than rounding in 16 bits does: decoding steps that attend to empty
# slots of the cache changed 0.002. So checks of logic are also made in fp32.
BOUNDS = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
REPORT = "A bug in r3lite or in this PyTorch: please report it with doctor.json."


@dataclass(frozen=True)
class Finding:
    """The result of a check: a line for people, what to do if it failed, and the figures that it was judged by."""

    state: Literal["ok", "failed", "skipped"]
    message: str
    remedy: str = ""
    measured: dict[str, float] = field(default_factory=dict)


def skipped(reason: str) -> Finding:
    """Returns the finding of a check that does not apply here, for this reason."""
    return Finding("skipped", reason)


def judged(sound: bool, message: str, remedy: str = REPORT, **measured: float) -> Finding:
    """Returns ok if `sound`, else failed with the remedy; `measured` are the figures that decided it."""
    if sound:
        return Finding("ok", message, measured=measured)
    return Finding("failed", message, remedy, measured)


def closeness(pairs: dict[torch.dtype, tuple[Tensor, Tensor]]) -> Finding:
    """Returns ok if log-probabilities that should be equal differ on average by at most BOUNDS, in each dtype.

    `pairs` has two tensors of one shape by dtype.
    """
    parts = []
    figures = {}
    sound = True
    for dtype, (ours, theirs) in pairs.items():
        name = dtype_name(dtype)
        difference = ours.float().cpu() - theirs.float().cpu()
        difference = difference.abs()
        mean = float(difference.mean())
        sound &= mean <= BOUNDS[dtype]  # not sound if the mean is nan
        parts.append(f"{mean:.1e} in {name} ({BOUNDS[dtype]:g} allowed)")
        figures[f"mean_difference_{name}"] = mean
        figures[f"largest_difference_{name}"] = float(difference.max())
    return judged(sound, f"log-probabilities differ by {', '.join(parts)}", **figures)


def largest(values: Iterable[float]) -> float:
    """Returns the greatest of some numbers, or nan if one of them is, which Python's `max` may pass over."""
    return float(torch.tensor(list(values)).max())
