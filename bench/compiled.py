"""What `--compile` brings to a base in NF4: decoding at batch 1 and an SFT step of 512 tokens, with and without it.

    python -m bench.compiled --models DIR --dtype bf16          # DIR/0.5B

Times are of the processor, not of the clock, so that what else the machine does counts little; on CUDA of the clock.
Every run is printed.
"""

import time
from collections.abc import Callable

import torch

from bench import options
from bench.contests import Ours
from r3lite.models import compiled

NEW, TOKENS, TURNS = 32, 512, 5


def seconds(work: Callable[[], object], device: torch.device) -> float:
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    began = clock()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - began


def report(name: str, works: dict[str, Callable[[], object]], device: torch.device) -> None:
    """Runs each of the works once to warm up, then all by turns."""
    for work in works.values():
        work()
    found = [[seconds(work, device) for work in works.values()] for _ in range(TURNS)]
    for how, runs in zip(works, zip(*found, strict=True), strict=True):
        milliseconds = " ".join(f"{1000 * run:,.0f}" for run in runs)
        print(f"{name}, {how}: {milliseconds} ms; the least {1000 * min(runs):,.0f}", flush=True)


def main() -> None:
    flags = options.parser(__doc__).parse_args()
    precision, folder = options.precision(flags), options.folder(flags, "0.5B")
    eager, other = (Ours(folder, precision, nf4=True) for _ in range(2))
    began = time.perf_counter()
    assert not (reason := compiled.missing_compiler(precision.device)), reason
    compiled.enable(other.model)
    print(f"compiled in {time.perf_counter() - began:.1f} s by the clock", flush=True)
    for name, work in (
        (f"{NEW} tokens at batch 1", lambda ours: ours.decode(1, NEW)),
        (f"an SFT step of {TOKENS} tokens", lambda ours: ours.sft(TOKENS, "4GiB")),
    ):
        report(name, {"as it is": work(eager), "compiled": work(other)}, precision.device)


if __name__ == "__main__":
    main()
