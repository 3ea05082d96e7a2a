"""Times decoding at batch 1 and an SFT step of 512 tokens with a base in NF4, with and without `--compile`.

    python -m bench.compiled --models DIR --dtype bf16          # DIR/0.5B

On a CPU, times are CPU time and not wall-clock time, so that other programs count little. On CUDA they are wall-clock
time. Every run is printed.
"""

import time
from collections.abc import Callable

import torch

from bench import options
from bench.contests import Ours
from r3lite.models import compiled

NEW_TOKENS = 32  # that are decoded
ROW_TOKENS = 512  # of an SFT row
TURNS = 5  # measurements of each variant
SIZE = "0.5B"


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds that the work takes: CPU time on a CPU, wall-clock time on CUDA."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    start = clock()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def report(name: str, works: dict[str, Callable[[], object]], device: torch.device) -> None:
    """Runs each variant once to warm up, then all by turns; prints the milliseconds of each run after the first.

    The keys of `works` are the names of the variants.
    """
    for work in works.values():
        work()
    times = [[seconds(work, device) for work in works.values()] for _ in range(TURNS)]  # [TURNS][variants]
    for variant, runs in zip(works, zip(*times, strict=True), strict=True):
        milliseconds = " ".join(f"{1000 * run:,.0f}" for run in runs)
        print(f"{name}, {variant}: {milliseconds} ms; the least {1000 * min(runs):,.0f}", flush=True)


def main() -> None:
    flags = options.parser(__doc__).parse_args()
    precision = options.precision(flags)
    folder = options.folder(flags, SIZE)
    eager = Ours(folder, precision, nf4=True)
    compiled_model = Ours(folder, precision, nf4=True)
    start = time.perf_counter()
    assert not (reason := compiled.missing_compiler(precision.device)), reason
    compiled.enable(compiled_model.model)
    print(f"compiled in {time.perf_counter() - start:.1f} s by the clock", flush=True)
    for name, work in (
        (f"{NEW_TOKENS} tokens at batch 1", lambda ours: ours.decode(1, NEW_TOKENS)),
        (f"an SFT step of {ROW_TOKENS} tokens", lambda ours: ours.sft(ROW_TOKENS, "4GiB")),
    ):
        report(name, {"as it is": work(eager), "compiled": work(compiled_model)}, precision.device)


if __name__ == "__main__":
    main()
