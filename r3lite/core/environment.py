"""What a command asks of the machine and the terminal around it, before it loads torch."""

import io
import os
import sys

# How often a waiting thread of GNU OpenMP, which PyTorch uses on Linux, looks for the other threads before it sleeps:
# 300,000 times by default. While a thread looks, it holds a core that the other threads may need (docs/figures.md).
SPINS = 1000
# How many matrix products compiled for a CPU the caches of oneDNN and PyTorch keep. Each size of a product is compiled
# anew, and takes 0.6 MiB in both caches together. A pass of training has some 42 sizes. With the default, 1,024, a
# process grew step by step on rows of ever new lengths.
CACHE_CAPACITY = "64"
# The environment variables of the two caches.
CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def spare_the_machine() -> None:
    """Sets environment variables so that waiting threads sleep soon and few compiled products are kept.

    Variables that the user has set stay. Must be called before torch is loaded, which reads them then.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
    for name in CACHES:
        os.environ.setdefault(name, CACHE_CAPACITY)


def escape_unencodable() -> None:
    """Makes stdout print characters that the console's encoding lacks as escapes (\\u6570) instead of failing.

    The encoding of a console on Windows may have only 256 characters.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # stderr does so by default


def ignore_output() -> None:
    """Discards what is still to be printed, also at exit. Called when the reader of stdout, such as `head`, is gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
