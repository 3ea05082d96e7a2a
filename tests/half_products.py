"""Products of half-precision matrices on a CPU that is slow in them, for tests that look at memory and not
at numbers."""

import contextlib
from collections.abc import Iterator

import pytest
import torch

from r3lite.devices.live_tensors import UncompiledMode
from r3lite.devices.precision import resolve_dtype

HALF = (torch.bfloat16, torch.float16)
ATEN = torch.ops.aten
PRODUCTS = {
    ATEN.mm.default: ATEN.mm.default,
    ATEN.mm.out: ATEN.mm.default,
    ATEN.bmm.default: ATEN.bmm.default,
    ATEN.bmm.out: ATEN.bmm.default,
    ATEN.addmm.default: ATEN.addmm.default,
    ATEN.addmm.out: ATEN.addmm.default,
    ATEN.addmm_.default: ATEN.addmm.default,
}


class ProductsInFp32(UncompiledMode):
    """Multiplies matrices of bf16 or fp16 in fp32, which such a CPU does several times as fast.

    The results have the dtype and shape that they would have: `LiveTensors`, entered after this, counts the same bytes.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        product = PRODUCTS.get(function)
        if product is None or args[-1].dtype not in HALF:
            return function(*args, **kwargs)
        factors = {name: value for name, value in kwargs.items() if name != "out"}
        result = product(*[matrix.float() for matrix in args], **factors)
        if "out" in kwargs:
            return kwargs["out"].copy_(result)
        if function is ATEN.addmm_.default:
            return args[0].copy_(result)
        return result.to(args[-1].dtype)


@contextlib.contextmanager
def fast_products() -> Iterator[None]:
    """Within it, products are computed in the format that this CPU is fast in: for work whose numbers do not matter."""
    if resolve_dtype("auto", torch.device("cpu")) == torch.bfloat16:
        yield
        return
    with ProductsInFp32():
        yield


@pytest.fixture
def fast_half_products() -> Iterator[None]:
    with fast_products():
        yield
