"""Free pages of the heap are returned to the system, tried in a process of its own."""

import platform
import subprocess
import sys

import pytest

HOLES = """
import torch
from r3lite.devices.heap import trim_heap

def resident():  # MiB
    for line in open("/proc/self/status", encoding="utf-8"):
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024

# The C library maps a block of this size by itself and, once it is freed, takes smaller ones from the heap.
torch.ones(8 << 18)  # 8 MiB
blocks = [torch.ones(1 << 18) for _ in range(400)]  # 1 MiB each
del blocks[:-1]  # the last one is the end of the heap, so that the C library cannot shrink it
held = resident()
trim_heap()
print(held, resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone has malloc_trim")
def test_free_pages_amid_the_heap_are_returned_to_the_system():
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    mib_before, mib_after = map(float, done.stdout.split())
    assert mib_before - mib_after > 300
