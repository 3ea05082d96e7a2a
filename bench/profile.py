"""Shows what the time of an SFT step, of decoding and of a GRPO round of the 0.5B model is spent on.

    python -m bench.profile --models DIR                # all three; JSON and tables under bench/results
    python -m bench.profile --only grpo --new 128       # 128 sampled tokens in each episode; the default is 64

Each piece of work runs three times: to warm up, to take its time, and under PyTorch's profiler. An operator's time
excludes the operators that it calls. On the CPU it is the time of the calling thread, on CUDA the time of the kernels.
Python and overhead is the time of the second run less the time of all operators; on CUDA the device is idle then. On
the CPU this is a lower bound, because the profiler lengthens small operators. The upper bound is the time of the third
run, under the profiler, less the time of all operators.
"""

import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from bench import options, parts, records
from bench.contests import PROMPT, RL_EPISODES, RL_PROMPT, Ours, rl_round
from r3lite.devices.precision import Precision

TOKENS = 512  # of the SFT step
BATCH = 8  # sequences that are decoded
NEW = 32  # tokens that are decoded in each sequence
RANK = 8  # of the adapters
SMALLEST_NAMED_PERCENT = 5  # the summary names no part with a smaller share
MILLISECONDS_PER_SECOND = 1000

TIME = records.Bench(
    name="profile",
    title="Where the time goes",
    keys=("part",),
    figures=("percent", "milliseconds"),
)

Work = Callable[[], dict[str, float] | None]  # returns the seconds of its stages, or None if it has no stages


def stages(folder: str, precision: Precision, new: int) -> dict[str, Callable[[], tuple[str, Work]]]:
    """Returns for each value of --only a function that builds the work, and returns its name and the work itself.

    The name can begin a sentence. The work is built only when it is due, so that the models of other work take no
    memory meanwhile.
    """
    return {
        "sft": lambda: (f"An SFT step of {TOKENS} tokens", Ours(folder, precision).sft(TOKENS, "4GiB")),
        "decode": lambda: (
            f"Decoding of {BATCH} x {NEW} tokens, after {PROMPT} each",
            Ours(folder, precision).decode(BATCH, NEW),
        ),
        "grpo": lambda: (
            f"A GRPO round of {RL_EPISODES} x ({RL_PROMPT} + {new}) tokens",
            rl_round(
                folder=folder,
                precision=precision,
                algorithm="grpo",
                episodes=RL_EPISODES,
                prompt=RL_PROMPT,
                new=new,
            ),
        ),
    }


def measure(work: Work, device: str) -> tuple[dict[str, float], float, dict[str, float] | None]:
    """Returns the seconds of each part, of the run under the profiler, and of the work's stages (None without stages).

    The seconds of the parts add up to the time of the run without the profiler, unless the operators took longer.
    """
    timed(work, device)  # warms up
    unprofiled_seconds, stage_seconds = timed(work, device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with parts.ranges(), profile(activities=activities, record_shapes=True) as profiler:
        profiled_seconds, _ = timed(work, device)
    self_time = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    part_seconds = parts.seconds_by_part(profiler.events(), lambda event: getattr(event, self_time), RANK)
    part_seconds[parts.OVERHEAD] = max(0.0, unprofiled_seconds - sum(part_seconds.values()))
    return part_seconds, profiled_seconds, stage_seconds


def timed(work: Work, device: str) -> tuple[float, dict[str, float] | None]:
    """Runs the work once; returns its seconds and a copy of what it returned."""
    start = time.perf_counter()
    returned = work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, dict(returned) if returned else None


def summary(name: str, part_seconds: dict[str, float], stage_seconds: dict[str, float] | None) -> str:
    """Returns sentences about the large parts, the largest first, and about the stages."""
    total = sum(part_seconds.values())
    percentages = sorted(((100 * seconds / total, part) for part, seconds in part_seconds.items()), reverse=True)
    phrases = []
    for percent, part in percentages:
        if percent >= SMALLEST_NAMED_PERCENT:
            phrases.append(f"{percent:.0f} % {parts.MEANINGS[part]}")
    text = f"{name} takes {total:.2f} s: {'; '.join(phrases)}. "
    text += f"Whatever is not named takes less than {SMALLEST_NAMED_PERCENT} %."
    if stage_seconds:
        stages_total = sum(stage_seconds.values())
        shares = [f"{100 * seconds / stages_total:.0f} % {stage}" for stage, seconds in stage_seconds.items()]
        text += f" By stage: {', '.join(shares)}."
    return text


def reliability(part_seconds: dict[str, float], profiled_seconds: float) -> str:
    """Returns a sentence with the time under the profiler and the bounds of the overhead (see the module)."""
    total = sum(part_seconds.values())
    operators = total - part_seconds[parts.OVERHEAD]
    bounds = sorted((part_seconds[parts.OVERHEAD] / total, 1 - operators / profiled_seconds))
    between = " and ".join(f"{100 * share:.0f} %" for share in bounds)
    return f"Under the profiler it took {profiled_seconds:.2f} s: {parts.OVERHEAD} is between {between}."


def rows(part_seconds: dict[str, float]) -> list[dict]:
    """Returns the rows of the table, in the order of the parts. A part without any time has no row."""
    total = sum(part_seconds.values())
    return [
        {
            "part": part,
            "percent": round(100 * seconds / total, 1),
            "milliseconds": round(MILLISECONDS_PER_SECOND * seconds, 1),
        }
        for part, seconds in part_seconds.items()
        if seconds
    ]


def main() -> None:
    parser = options.parser(__doc__)
    parser.add_argument("--only", nargs="*", default=("sft", "decode", "grpo"), choices=("sft", "decode", "grpo"))
    parser.add_argument("--new", type=int, default=64, help="tokens sampled in an episode of GRPO")
    flags = parser.parse_args()
    precision = options.precision(flags)
    device = precision.device.type
    for stage in flags.only:
        provenance = records.provenance(precision)
        name, work = stages(options.folder(flags, "0.5B"), precision, flags.new)[stage]()
        part_seconds, profiled_seconds, stage_seconds = measure(work, device)
        note = f"{summary(name, part_seconds, stage_seconds)} {reliability(part_seconds, profiled_seconds)}"
        run = {"section": stage, **provenance, "note": note, "records": rows(part_seconds)}
        print(f"\n## {stage}\n\n{records.conditions(run)}\n\n{note}\n\n{records.table(run['records'])}", flush=True)
        records.keep(folder=flags.results, device=device, bench=TIME, run=run)


if __name__ == "__main__":
    main()
