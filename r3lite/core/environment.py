"""What a command asks of the machine and the terminal around it, before it loads torch."""

import io
import os
import sys

# How often a waiting thread of GNU OpenMP, which PyTorch uses on Linux, looks for the others before it sleeps: 300,000
# times by default. While it looks it holds a core, which the thread that it waits for may need: docs/figures.md.
SPINS = 1000
# How many products compiled for a CPU the caches of oneDNN and PyTorch keep, one for each size that occurs: 1,024 by
# default, with which a process grew step by step on rows of ever new lengths. One product takes 0.6 MiB in both caches
# together, and a pass of training has some 42 products.
CACHE_CAPACITY = "64"
CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def spare_the_machine() -> None:
    """Has waiting threads sleep soon and few compiled products kept, unless the user has said otherwise.

    Works before torch is loaded.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
    for name in CACHES:
        os.environ.setdefault(name, CACHE_CAPACITY)


def print_anything() -> None:
    """Has characters that a console's encoding lacks printed as escapes (\\u6570): on Windows it may have only 256."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr has it


def ignore_output() -> None:
    """Discards what is still to be printed, also at exit: the reader of a pipe, such as `head`, has closed it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
