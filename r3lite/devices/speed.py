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

READ_BYTES = 1 << 27  # more than the cache of a laptop's processor or card holds
WIDTH = 896  # columns of the weights that are read, as in Qwen2.5-0.5B
LAUNCHES = 200  # kernels in one measurement of their cost
ENOUGH = 0.02  # seconds of a measurement; products are made larger until one takes so long
FP16_EDGE = 2048  # edge of the products that compare fp16 with fp32
# Edge of the largest product that is measured.
LARGEST_EDGE = 2048
LARGEST_EDGE_ON_CUDA = 8192
REPEATS = 3  # measurements, of which the quickest counts

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""x [N, in] and a weight [out, in] -> [N, out]."""


def measure(device: torch.device, product: Product, dtypes: Iterable[str] = DTYPES) -> Speeds:
    """Returns the figures of a device, for those of `dtypes` that it has.

    `product` is the function by which the network multiplies rows by its weights.
    """
    on_cuda = device.type == "cuda"
    native = {name: TORCH_DTYPES[name] for name in dtypes if has_dtype(device, name)}
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
    """Returns the figures of a device in a dtype, measured once in each process; None, with a warning, if that fails.

    They are not stored, because the share of a device that other programs take changes from run to run.
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


def has_dtype(device: torch.device, dtype: str) -> bool:
    """Returns False for bf16 on a CUDA card that only emulates it, as cards before Ampere do; else True."""
    if dtype != "bf16" or device.type != "cuda":
        return True
    return torch.cuda.is_bf16_supported(including_emulation=False)


@torch.no_grad()
def read_speed(device: torch.device, dtype: torch.dtype, product: Product, size: int = READ_BYTES) -> float:
    """Returns the bytes of weights that products with one row read in a second; the weights have `size` bytes."""
    rows = size // (WIDTH * dtype.itemsize)
    weights = torch.ones(rows, WIDTH, device=device, dtype=dtype)
    row = torch.ones(1, WIDTH, device=device, dtype=dtype)
    return weights.nbytes / seconds(lambda: product(row, weights), device)


@torch.no_grad()
def product_speed(device: torch.device, dtype: torch.dtype, product: Product) -> float:
    """Returns the floating-point operations a second of a product of two square matrices.

    Their edge is doubled until the product takes ENOUGH seconds, or until it is the largest edge.
    """
    largest_edge = LARGEST_EDGE_ON_CUDA if device.type == "cuda" else LARGEST_EDGE
    edge = 256
    while edge < largest_edge and _product_seconds(device, dtype, product, edge=edge) < ENOUGH:
        edge *= 2
    operations = 2 * edge**3
    return operations / _product_seconds(device, dtype, product, edge=edge, repeats=REPEATS)


def _product_seconds(
    device: torch.device, dtype: torch.dtype, product: Product, *, edge: int, repeats: int = 1
) -> float:
    """Returns the seconds of a product of two matrices [edge, edge], the least of `repeats` measurements."""
    generator = torch.Generator(device)  # the run's random numbers stay as they are
    a = torch.randn(edge, edge, device=device, generator=generator).to(dtype)
    b = torch.randn(edge, edge, device=device, generator=generator).to(dtype)
    return seconds(lambda: product(a, b), device, repeats)


def warn_of_slow_fp16(precision: Precision) -> None:
    """Warns if a CUDA card multiplies fp16 more slowly than fp32, as GTX 16xx cards have been reported to do."""
    device = precision.device
    if device.type != "cuda" or precision.dtype != torch.float16:
        return
    fp16_seconds = _product_seconds(device, torch.float16, torch.matmul, edge=FP16_EDGE)
    fp32_seconds = _product_seconds(device, torch.float32, torch.matmul, edge=FP16_EDGE)
    if fp16_seconds > fp32_seconds:
        speedup = fp32_seconds / fp16_seconds
        cause = f"this GPU multiplies fp16 at {speedup:.2f} times the speed of fp32. fp16 halves the memory"
        print(f"warning: {cause}; if the run fits in memory, --dtype fp32 is faster.", file=sys.stderr)


def launch_seconds(device: torch.device) -> float:
    """Returns the seconds of a kernel that does next to nothing, when PyTorch launches many in a row."""
    x = torch.zeros(1, device=device)

    def launch_all() -> None:
        for _ in range(LAUNCHES):
            x.add_(1)

    return seconds(launch_all, device) / LAUNCHES


def host_copy_speed(device: torch.device, pinned: bool, size: int = 1 << 26) -> float:
    """Returns the bytes a second of a copy of `size` bytes from the host's memory to the device's.

    Raises RuntimeError if memory is to be `pinned` but the system refuses.
    """
    numbers = size // torch.float32.itemsize
    source = torch.ones(numbers, pin_memory=pinned)
    target = torch.empty(numbers, device=device)
    return source.nbytes / seconds(lambda: target.copy_(source, non_blocking=True), device)


def _link_speed(device: torch.device) -> float:
    """Returns the bytes a second of copies to a card, from pinned memory if possible, as streamed layers are copied."""
    try:
        return host_copy_speed(device, pinned=True)
    except RuntimeError:
        return host_copy_speed(device, pinned=False)


def seconds(work: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Returns the seconds of a call of `work`: the least of `repeats` measurements of about ENOUGH seconds each.

    The least, because other programs can only make a measurement longer. The first call is not counted: it loads
    kernels.
    """

    def timed(calls: int) -> float:
        """Returns the mean seconds of one of `calls` calls."""
        start = time.perf_counter()
        for _ in range(calls):
            work()
        synchronize(device)
        return (time.perf_counter() - start) / calls

    timed(1)
    calls = max(1, math.ceil(ENOUGH / max(timed(1), 1e-9)))
    return min(timed(calls) for _ in range(repeats))


def synchronize(device: torch.device) -> None:
    """Waits until a device has done all work that is queued on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
