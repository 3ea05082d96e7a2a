"""What a check found, and when log-probabilities are close enough."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from r3lite.devices.precision import dtype_name

# Bounds of the mean difference between log-probabilities that should be equal. A CPU was off by 1e-6 in fp32, by 0.002
# in fp16 and by 0.017 in bf16. A mistake may cost less than that: decoding steps that see empty slots cost 0.002. So
# checks of logic are made in fp32, too.
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
    """Returns that the check does not apply here."""
    return Finding("skipped", reason)


def judged(sound: bool, message: str, remedy: str = REPORT, **measured: float) -> Finding:
    """Returns ok if `sound`, else failed, with the figures that it was judged by."""
    if sound:
        return Finding("ok", message, measured=measured)
    return Finding("failed", message, remedy, measured)


def closeness(pairs: dict[torch.dtype, tuple[Tensor, Tensor]]) -> Finding:
    """Returns ok if log-probabilities that should be equal differ by no more than BOUNDS on average, in each dtype."""
    parts = []
    figures = {}
    sound = True
    for dtype, (ours, theirs) in pairs.items():
        name = dtype_name(dtype)
        difference = ours.float().cpu() - theirs.float().cpu()
        difference = difference.abs()
        mean = float(difference.mean())
        sound &= mean <= BOUNDS[dtype]  # False for a nan
        parts.append(f"{mean:.1e} in {name} ({BOUNDS[dtype]:g} allowed)")
        figures[f"mean_difference_{name}"] = mean
        figures[f"largest_difference_{name}"] = float(difference.max())
    return judged(sound, f"log-probabilities differ by {', '.join(parts)}", **figures)


def largest(values: Iterable[float]) -> float:
    """Returns the greatest of some numbers, or nan if one of them is, which Python's `max` may pass over."""
    return float(torch.tensor(list(values)).max())
