"""The speeds of a device, measured and kept for the predictions of plans."""

import contextlib

import torch

from r3lite.checks.finding import Finding, judged
from r3lite.devices import cards, speed
from r3lite.devices.cards import Speeds
from r3lite.models.linear import linear


def measured_speeds(device: torch.device, kept: list[Speeds]) -> Finding:
    """How fast the device is; the figures are added to `kept`."""
    found = speed.measure(device, linear)
    kept.append(found)
    why = cards.keep(found)
    products = ", ".join(f"{name} {short(flops / 1e9)}" for name, flops in found.flops.items())
    message = f"memory {short(found.bandwidth / 1e9)} GB/s; products {products} GFLOPS"
    message += f"; kernel launch {found.launch * 1e6:.1f} us"
    message += f"; not saved for predictions: {why}" if why else ""
    if device.type == "cuda":
        message += f"; from the host {speed.host_copy_speed(device, pinned=False) / 1e9:.1f} GB/s"
        with contextlib.suppress(RuntimeError):  # memory cannot be pinned here, as the lines above say
            message += f", pinned {speed.host_copy_speed(device, pinned=True) / 1e9:.1f}"
        if found.flops["fp16"] < found.flops["fp32"]:
            message += "; fp16 is slower than fp32: if a run fits in memory, pass --dtype fp32"
    return judged(True, message)


def short(figure: float) -> str:
    """A figure in three digits, or as a whole number."""
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"
