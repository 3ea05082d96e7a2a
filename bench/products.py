"""Compares the matrix products of models/linear.py with PyTorch's `F.linear`, in fp32 on this CPU.

    OMP_NUM_THREADS=1 python -m bench.products

Prints a table with the milliseconds of a product, as medians over TURNS turns of each function; the two functions take
turns. In a network, weights come from memory and not from the cache. So each turn reads copies of a weight one after
the other, which together have at least COPIES_BYTES: more than the cache holds.
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

TURNS = 7
TURN_SECONDS = 0.1  # the shortest duration of a turn
COPIES_BYTES = 1 << 27  # at least this many in all copies of a weight together
FP32_BYTES = 4
MILLISECONDS_PER_SECOND = 1000
WEIGHTS = {  # shapes (out, in)
    "0.5B, head": (151936, 896),
    "0.5B, gate and up": (9728, 896),
    "0.5B, gate and up, gradient": (896, 9728),
    "0.5B, down": (896, 4864),
    "0.5B, q, k and v": (1152, 896),
    "0.5B, o": (896, 896),
    "e5-base, intermediate": (3072, 768),
}
ROWS = (1, 8, 32, 128, 512)  # rows of x


def turn(product: Product, x: Tensor, weights: list[Tensor]) -> float:
    """Returns the mean seconds of one product in a turn, which multiplies x by each copy of the weight repeatedly."""
    start = time.perf_counter()
    calls = 0
    while time.perf_counter() < start + TURN_SECONDS:
        for weight in weights:
            product(x, weight)
        calls += len(weights)
    return (time.perf_counter() - start) / calls


@torch.no_grad()
def main() -> None:
    print(f"{machine.processor()}, threads {torch.get_num_threads()}, torch {torch.__version__}\n")
    print("| weight | rows | F.linear | r3lite | of its time |\n|---|---|---|---|---|")
    for name, (outputs, inputs) in WEIGHTS.items():
        copies = math.ceil(COPIES_BYTES / (FP32_BYTES * outputs * inputs))
        weights = [torch.randn(outputs, inputs) for _ in range(copies)]
        if "gradient" in name:
            # The gradient's product reads the transposed weight, which is not contiguous.
            weights = [weight.t().contiguous().t() for weight in weights]
        for rows in ROWS[:-1] if "head" in name else ROWS:  # logits are computed for 128 rows at a time
            x = torch.randn(rows, inputs)
            for product in (F.linear, linear):
                product(x, weights[0])  # the first call compiles the kernel
            turns = [(turn(F.linear, x, weights), turn(linear, x, weights)) for _ in range(TURNS)]
            theirs, ours = (MILLISECONDS_PER_SECOND * statistics.median(times) for times in zip(*turns, strict=True))
            print(f"| {name} | {rows} | {theirs:.2f} | {ours:.2f} | {ours / theirs:.2f} |", flush=True)


if __name__ == "__main__":
    main()
