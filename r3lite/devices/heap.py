"""Returns memory that the C library keeps, but does not use, to the system."""

import ctypes
import sys


def trim_heap() -> None:
    """Returns the free pages of the heap to the system, if the C library is glibc; else does nothing.

    glibc keeps the pages of freed blocks of up to 32 MiB for later blocks (mallopt(3), M_MMAP_THRESHOLD). On a CPU most
    activations are such blocks, while a KV cache has larger ones, which do not reuse these pages.
    """
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
    if trim is not None:
        trim(0)
