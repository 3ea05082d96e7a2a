"""What the kernels of models/linear.py bring on this CPU: r3lite's products beside `F.linear`, in fp32, by turns.

    OMP_NUM_THREADS=1 python -m bench.products

Prints a table: milliseconds of a product, medians of TURNS turns. As in a network, weights come from memory: copies of
one are read in turn, more than a cache holds.
"""

import math
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor

from r3lite.devices import machine
from r3lite.devices.speed import Product
from r3lite.models.linear import linear

TURNS, SECONDS, BYTES = 7, 0.1, 1 << 27  # a turn takes so many seconds at least, and reads weights of so many bytes
WEIGHTS = {  # (out, in), as they lie in memory
    "0.5B, head": (151936, 896),
    "0.5B, gate and up": (9728, 896),
    "0.5B, gate and up, gradient": (896, 9728),
    "0.5B, down": (896, 4864),
    "0.5B, q, k and v": (1152, 896),
    "0.5B, o": (896, 896),
    "e5-base, intermediate": (3072, 768),
}
ROWS = 1, 8, 32, 128, 512


def turn(product: Product, x: Tensor, weights: list[Tensor]) -> float:
    """Seconds of one product."""
    began, calls = time.perf_counter(), 0
    while time.perf_counter() < began + SECONDS:
        for weight in weights:
            product(x, weight)
        calls += len(weights)
    return (time.perf_counter() - began) / calls


@torch.no_grad()
def main() -> None:
    print(f"{machine.processor()}, threads {torch.get_num_threads()}, torch {torch.__version__}\n")
    print("| weight | rows | F.linear | r3lite | of its time |\n|---|---|---|---|---|")
    for name, (out, size) in WEIGHTS.items():
        copies = math.ceil(BYTES / (4 * out * size))
        weights = [torch.randn(out, size) for _ in range(copies)]
        if "gradient" in name:
            weights = [weight.t().contiguous().t() for weight in weights]
        for rows in ROWS[:-1] if "head" in name else ROWS:  # logits are made for 128 rows at a time
            x = torch.randn(rows, size)
            for product in (F.linear, linear):
                product(x, weights[0])  # compiles its kernel
            turns = [(turn(F.linear, x, weights), turn(linear, x, weights)) for _ in range(TURNS)]
            theirs, ours = (1000 * statistics.median(side) for side in zip(*turns, strict=True))
            print(f"| {name} | {rows} | {theirs:.2f} | {ours:.2f} | {ours / theirs:.2f} |", flush=True)


if __name__ == "__main__":
    main()
