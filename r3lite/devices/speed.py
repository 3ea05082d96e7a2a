"""How fast a device is, measured in half a second: its memory, its matrix products, and what a kernel costs.

Knows no model. Measures the figures that `cards` describes, from which times are predicted.
"""

import functools
import math
import sys
import time
from collections.abc import Callable, Iterable

import torch

from r3lite.devices.cards import DTYPES, MEASURED, Speeds, device_name
from r3lite.devices.precision import DTYPES as TORCH_DTYPES
from r3lite.devices.precision import Precision

READ = 1 << 27  # bytes: beyond what the cache of a laptop's processor or card holds
WIDTH = 896  # of the weights that are read: Qwen2.5-0.5B's
LAUNCHES = 200  # kernels of one measurement of their cost
ENOUGH = 0.02  # seconds of one call, beyond which a larger product says no more
EDGE = 2048  # of the products by which fp16 is held against fp32
LARGEST = {"cuda": 8192}  # edge of the largest product; elsewhere 2048
REPEATS = 3  # measurements, of which the quickest counts

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""x [N, in] and a weight [out, in] -> [N, out]."""


def measure(device: torch.device, product: Product, dtypes: Iterable[str] = DTYPES) -> Speeds:
    """Returns the figures of a device, in those of `dtypes` that it has.

    `product` is the function by which the network multiplies rows by its weights.
    """
    on_cuda = device.type == "cuda"
    native = {name: TORCH_DTYPES[name] for name in dtypes if has(device, name)}
    return Speeds(
        name=device_name(device),
        bandwidth={name: read_speed(device, dtype, product) for name, dtype in native.items()},
        flops={name: product_speed(device, dtype, product) for name, dtype in native.items()},
        launch=launch_seconds(device),
        source=MEASURED,
        memory=torch.cuda.get_device_properties(device).total_memory if on_cuda else None,
        link=_link_speed(device) if on_cuda else None,
    )


@functools.cache
def speeds_of(device: torch.device, dtype: str, product: Product) -> Speeds | None:
    """Returns the figures of a device in a dtype, measured once a process; None, with a warning, if that fails.

    Each process measures anew, because the share of a device that other programs take changes from run to run.
    """
    try:
        return measure(device, product, [dtype])
    except Exception as error:  # of any kind: a run goes on without a prediction
        print(f"warning: cannot measure the speed of this device: {error!r:.200}", file=sys.stderr)
        return None
    finally:
        if device.type == "cuda":  # the run finds its card as it was
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def has(device: torch.device, dtype: str) -> bool:
    """Returns whether a device multiplies in a dtype at all; cards before Ampere only emulate bf16."""
    if dtype != "bf16" or device.type != "cuda":
        return True
    return torch.cuda.is_bf16_supported(including_emulation=False)


@torch.no_grad()
def read_speed(device: torch.device, dtype: torch.dtype, product: Product, size: int = READ) -> float:
    """Returns the bytes of weights that products of one row read in a second."""
    rows = size // (WIDTH * dtype.itemsize)
    weights = torch.ones(rows, WIDTH, device=device, dtype=dtype)
    row = torch.ones(1, WIDTH, device=device, dtype=dtype)
    return weights.nbytes / seconds(lambda: product(row, weights), device)


@torch.no_grad()
def product_speed(device: torch.device, dtype: torch.dtype, product: Product) -> float:
    """Returns the operations a second of products of the first size that takes ENOUGH seconds, or of the largest."""
    largest = LARGEST.get(device.type, 2048)
    edge = 256
    while edge < largest and _product_seconds(device, dtype, edge, 1, product) < ENOUGH:
        edge *= 2
    return 2 * edge**3 / _product_seconds(device, dtype, edge, REPEATS, product)


def _product_seconds(device: torch.device, dtype: torch.dtype, edge: int, repeats: int, product: Product) -> float:
    """Returns the seconds of a product of two matrices [edge, edge]."""
    generator = torch.Generator(device)  # the run's random numbers stay as they are
    a = torch.randn(edge, edge, device=device, generator=generator).to(dtype)
    b = torch.randn(edge, edge, device=device, generator=generator).to(dtype)
    return seconds(lambda: product(a, b), device, repeats)


def warn_of_slow_fp16(precision: Precision) -> None:
    """Warns if a CUDA card multiplies fp16 more slowly than fp32, as GTX 16xx cards have been reported to do."""
    device = precision.device
    if device.type != "cuda" or precision.dtype != torch.float16:
        return
    half = _product_seconds(device, torch.float16, EDGE, 1, torch.matmul)
    full = _product_seconds(device, torch.float32, EDGE, 1, torch.matmul)
    if half > full:
        cause = f"this GPU multiplies fp16 at {full / half:.2f} times the speed of fp32. fp16 halves the memory"
        print(f"warning: {cause}; if the run fits in memory, --dtype fp32 is faster.", file=sys.stderr)


def launch_seconds(device: torch.device) -> float:
    """Returns the seconds of a kernel that does next to nothing, when PyTorch launches many in a row."""
    x = torch.zeros(1, device=device)

    def launch_all() -> None:
        for _ in range(LAUNCHES):
            x.add_(1)

    return seconds(launch_all, device) / LAUNCHES


def host_copy_speed(device: torch.device, pinned: bool, size: int = 1 << 26) -> float:
    """Returns the bytes a second from the host's memory to the device's.

    Raises RuntimeError if memory cannot be pinned here.
    """
    source = torch.ones(size // 4, pin_memory=pinned)
    target = torch.empty(size // 4, device=device)
    return source.nbytes / seconds(lambda: target.copy_(source, non_blocking=True), device)


def _link_speed(device: torch.device) -> float:
    """Returns the bytes a second of copies to a card, from pinned memory if possible, as streamed layers are copied."""
    try:
        return host_copy_speed(device, pinned=True)
    except RuntimeError:
        return host_copy_speed(device, pinned=False)


def seconds(work: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Returns the seconds of a call: the least of `repeats` measurements of about ENOUGH seconds each.

    Other programs can only make a measurement longer. The first call is not counted: it loads kernels.
    """

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
