"""How fast a device is, measured in seconds: its memory, its matrix products, and what a kernel costs however small.

Knows no model. What is measured is what `cards` describes: what times are predicted from.
"""

import math
import time
from collections.abc import Callable

import torch

from r3lite.devices.cards import DTYPES, MEASURED, Speeds, device_name
from r3lite.devices.precision import DTYPES as TORCH_DTYPES

COPIED = 1 << 28  # bytes: beyond what any processor's or card's cache holds, but for the largest servers'
LAUNCHES = 200  # kernels of one measurement of their cost
ENOUGH = 0.02  # seconds of one call, beyond which a larger product says no more
LARGEST = {"cuda": 8192}  # edge of the largest product; elsewhere 2048


def measure(device: torch.device) -> Speeds:
    """What a device does in a second."""
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    flops = {name: product_speed(device, TORCH_DTYPES[name]) for name in DTYPES if has(device, name)}
    return Speeds(device_name(device), copy_speed(device), flops, launch_seconds(device), MEASURED, memory)


def has(device: torch.device, dtype: str) -> bool:
    """Whether a device multiplies in a dtype at all; cards before Ampere only emulate bf16."""
    return dtype != "bf16" or device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def copy_speed(device: torch.device, size: int = COPIED) -> float:
    """Bytes a second that the device's memory reads and writes, while it copies `size` bytes."""
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 8)
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source), device)


def product_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of matrix products in a dtype: of the first size that takes long enough to be measured."""
    edge = 256
    while edge < LARGEST.get(device.type, 2048) and _product_seconds(device, dtype, edge, repeats=1) < ENOUGH:
        edge *= 2
    return 2 * edge**3 / _product_seconds(device, dtype, edge, repeats=5)


def _product_seconds(device: torch.device, dtype: torch.dtype, edge: int, repeats: int) -> float:
    a, b = (torch.randn(edge, edge, device=device).to(dtype) for _ in range(2))
    return seconds(lambda: a @ b, device, repeats)


def launch_seconds(device: torch.device) -> float:
    """Seconds of a kernel that does next to nothing, as PyTorch launches it, one after the other."""
    x = torch.zeros(1, device=device)

    def launches() -> None:
        for _ in range(LAUNCHES):
            x.add_(1)

    return seconds(launches, device) / LAUNCHES


def host_copy_speed(device: torch.device, pinned: bool, size: int = 1 << 26) -> float:
    """Bytes a second from the host's memory to the device's. Raises RuntimeError if memory cannot be pinned here."""
    source = torch.ones(size // 4, pin_memory=pinned)
    target = torch.empty(size // 4, device=device)
    return source.nbytes / seconds(lambda: target.copy_(source, non_blocking=True), device)


def seconds(work: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Time of a call: the least of so many measurements of about ENOUGH seconds each, as other programs can only make
    it longer. The first call is not counted: it loads kernels."""

    def timed(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            work()
        synchronize(device)
        return (time.perf_counter() - start) / calls

    timed(1)
    calls = max(1, math.ceil(ENOUGH / max(timed(1), 1e-9)))
    return min(timed(calls) for _ in range(repeats))


def synchronize(device: torch.device) -> None:
    """Waits until a device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
