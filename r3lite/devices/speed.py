"""How fast a device is, measured in seconds: its memory, its matrix products, and what a kernel costs however small.

Knows no model. What is measured is what `cards` describes: what times are predicted from.
"""

import functools
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from r3lite.devices import cards
from r3lite.devices.cards import BESIDE_OTHERS, DTYPES, MEASURED, Speeds, device_name
from r3lite.devices.precision import DTYPES as TORCH_DTYPES
from r3lite.devices.precision import Precision

READ = 1 << 28  # bytes: beyond what any processor's or card's cache holds, but for the largest servers'
WIDTH = 896  # of the weights that are read: Qwen2.5-0.5B's
LAUNCHES = 200  # kernels of one measurement of their cost
ENOUGH = 0.02  # seconds of one call, beyond which a larger product says no more
BUSY = 0.5  # load for each core, beyond which what is measured of a CPU is measured again later
EDGE = 2048  # of the products by which fp16 is held against fp32
LARGEST = {"cuda": 8192}  # edge of the largest product; elsewhere 2048

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""x [N, in] and a weight [out, in] -> [N, out]."""


def measure(device: torch.device, product: Product) -> Speeds:
    """What a device does in a second; `product` is that by which the network multiplies rows by its weights."""
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    dtypes = {name: TORCH_DTYPES[name] for name in DTYPES if has(device, name)}
    flops = {name: product_speed(device, dtype, product) for name, dtype in dtypes.items()}
    reads = {name: read_speed(device, dtype, product) for name, dtype in dtypes.items()}
    link = _link_speed(device) if device.type == "cuda" else None
    return Speeds(device_name(device), reads["fp32"], flops, launch_seconds(device), MEASURED, memory, reads, link)


@functools.cache  # for this run, if it cannot be kept
def speeds_of(device: torch.device, product: Product) -> Speeds | None:
    """What was measured of a device; what was not is measured now, in seconds. None, with a warning, if that fails.

    What was measured of a CPU beside other programs is measured again when they rest.
    """
    kept, busy = cards.measured(device), device.type == "cpu" and is_busy()
    if kept and (busy or kept.source == MEASURED):
        return kept
    start = time.perf_counter()
    try:
        found = measure(device, product)
    except Exception as error:  # of any kind: a run goes on without a prediction
        print(f"warning: cannot measure the speed of this device: {error!r:.200}", file=sys.stderr)
        return None
    finally:
        if device.type == "cuda":  # the run finds its card as it was
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    took = time.perf_counter() - start
    found = replace(found, source=BESIDE_OTHERS) if busy else found
    message = "saved " + ("until other programs are idle" if busy else "(python -m r3lite.doctor measures it again)")
    message = f"not saved: {why}" if (why := cards.keep(found)) else message
    print(f"measured the speed of this device in {took:.1f} s; {message}", file=sys.stderr)
    return found


def is_busy() -> bool:
    """Whether other programs took half of the processor in the last minute, as far as the system says."""
    try:
        return os.getloadavg()[0] > BUSY * (os.cpu_count() or 1)
    except (AttributeError, OSError):  # Windows does not say it
        return False


def has(device: torch.device, dtype: str) -> bool:
    """Whether a device multiplies in a dtype at all; cards before Ampere only emulate bf16."""
    return dtype != "bf16" or device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


@torch.no_grad()
def read_speed(device: torch.device, dtype: torch.dtype, product: Product, size: int = READ) -> float:
    """Bytes a second of `size` bytes of weights, as a product of one row reads them. A CPU's core copies far more."""
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 8)
    weights = torch.ones(size // (dtype.itemsize * WIDTH), WIDTH, device=device, dtype=dtype)
    row = torch.ones(1, WIDTH, device=device, dtype=dtype)
    return weights.nbytes / seconds(lambda: product(row, weights), device)


@torch.no_grad()
def product_speed(device: torch.device, dtype: torch.dtype, product: Product) -> float:
    """Operations a second of matrix products in a dtype: of the first size that takes long enough to be measured."""
    edge = 256
    while edge < LARGEST.get(device.type, 2048) and _product_seconds(device, dtype, edge, 1, product) < ENOUGH:
        edge *= 2
    return 2 * edge**3 / _product_seconds(device, dtype, edge, 5, product)


def _product_seconds(device: torch.device, dtype: torch.dtype, edge: int, repeats: int, product: Product) -> float:
    own = torch.Generator(device)  # the run's random numbers stay as they are
    a, b = (torch.randn(edge, edge, device=device, generator=own).to(dtype) for _ in range(2))
    return seconds(lambda: product(a, b), device, repeats)


def warn_of_slow_fp16(precision: Precision) -> None:
    """Warns if a CUDA card multiplies fp16 more slowly than fp32, as GTX 16xx cards have been reported to do."""
    device = precision.device
    if device.type != "cuda" or precision.dtype != torch.float16:
        return
    dtypes = torch.float16, torch.float32
    fast, slow = (_product_seconds(device, dtype, EDGE, 1, torch.matmul) for dtype in dtypes)
    if fast > slow:
        found = f"this GPU multiplies fp16 at {slow / fast:.2f} times the speed of fp32. fp16 halves the memory"
        print(f"warning: {found}; if the run fits in memory, --dtype fp32 is faster.", file=sys.stderr)


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


def _link_speed(device: torch.device) -> float:
    """Bytes a second of copies to a card as streamed layers are copied: of pinned memory, if that can be had."""
    try:
        return host_copy_speed(device, pinned=True)
    except RuntimeError:
        return host_copy_speed(device, pinned=False)


def seconds(work: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Seconds of a call: the least of `repeats` measurements of about ENOUGH seconds each, as other programs can only
    make one longer. The first call is not counted: it loads kernels."""

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
