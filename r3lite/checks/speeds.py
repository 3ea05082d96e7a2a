"""The speeds of a device, from which plans predict times."""

import contextlib

import torch

from r3lite.checks.finding import Finding, judged
from r3lite.devices import speed
from r3lite.devices.cards import Speeds
from r3lite.models.linear import linear


def measured_speeds(device: torch.device, results: list[Speeds]) -> Finding:
    """Measures how fast the device is, appends the speeds to `results`, and returns them in words."""
    speeds = speed.measure(device, linear)
    results.append(speeds)
    products = ", ".join(f"{dtype} {short(flops / 1e9)}" for dtype, flops in speeds.flops.items())
    message = f"memory {short(speeds.bandwidth['fp32'] / 1e9)} GB/s; products {products} GFLOPS"
    message += f"; kernel launch {speeds.launch * 1e6:.1f} us"
    if device.type == "cuda":
        message += f"; from the host {speed.host_copy_speed(device, pinned=False) / 1e9:.1f} GB/s"
        with contextlib.suppress(RuntimeError):  # memory cannot be pinned here; the check `offload` reports it
            message += f", pinned {speed.host_copy_speed(device, pinned=True) / 1e9:.1f}"
        if speeds.flops["fp16"] < speeds.flops["fp32"]:
            message += "; fp16 is slower than fp32: if a run fits in memory, pass --dtype fp32"
    return judged(True, message)


def short(figure: float) -> str:
    """Returns a figure with three digits, or as a whole number from 100 on."""
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"
