"""Where the time of a step goes: SFT, decoding, and a whole GRPO round of the 0.5B model.

    python -m bench.profile --models DIR                # all three; JSON and tables under bench/results
    python -m bench.profile --only grpo --new 128       # with more sampled tokens an episode; the default is 64

Each is done three times: to warm up, to see how long it takes, and under PyTorch's profiler. An operator's time is its
own: on the CPU that of the thread that calls it, on CUDA that of its kernels. What operators leave of the time without
the profiler is Python and overhead; on CUDA that is when the device has nothing to do. On the CPU the profiler makes
small operators longer, too, so it is a lower bound there; an upper one is what they leave of the time with it.
"""

import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from bench import options, parts, records
from bench.contests import PROMPT, RL_EPISODES, RL_PROMPT, Ours, rl_round
from r3lite.devices.precision import Precision

TOKENS = 512  # of the SFT step
BATCH, NEW = 8, 32  # of decoding
RANK = 8  # of the adapters
WORTH_SAYING = 5  # percent

TIME = records.Bench("profile", "Where the time goes", keys=("part",), figures=("percent", "milliseconds"))

Work = Callable[[], dict[str, float] | None]  # may return the seconds of its stages


def stages(folder: str, precision: Precision, new: int) -> dict[str, Callable[[], tuple[str, Work]]]:
    """What can be profiled: its name in a sentence, and the work, made when it is its turn."""
    return {
        "sft": lambda: (f"An SFT step of {TOKENS} tokens", Ours(folder, precision).sft(TOKENS, "4GiB")),
        "decode": lambda: (
            f"Decoding of {BATCH} x {NEW} tokens, after {PROMPT} each",
            Ours(folder, precision).decode(BATCH, NEW),
        ),
        "grpo": lambda: (
            f"A GRPO round of {RL_EPISODES} x ({RL_PROMPT} + {new}) tokens",
            rl_round(folder, precision, "grpo", RL_EPISODES, RL_PROMPT, new),
        ),
    }


def measure(work: Work, device: str) -> tuple[dict[str, float], float, dict[str, float] | None]:
    """Seconds of the parts of a piece of work, of all of it under the profiler, and of its stages."""
    timed(work, device)
    plain, laps = timed(work, device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with parts.ranges(), profile(activities=activities, record_shapes=True) as profiler:
        profiled, _ = timed(work, device)
    own = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    found = parts.seconds_by_part(profiler.events(), lambda event: getattr(event, own), RANK)
    found[parts.REST] = max(0.0, plain - sum(found.values()))
    return found, profiled, laps


def timed(work: Work, device: str) -> tuple[float, dict[str, float] | None]:
    """Seconds, and what the work returned."""
    start = time.perf_counter()
    returned = work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, dict(returned) if returned else None


def summary(name: str, found: dict[str, float], laps: dict[str, float] | None) -> str:
    """The parts that matter in words, the largest first."""
    total = sum(found.values())
    large = sorted(((100 * s / total, part) for part, s in found.items()), reverse=True)
    said = [f"{share:.0f} % {parts.MEANINGS[part]}" for share, part in large if share >= WORTH_SAYING]
    text = f"{name} takes {total:.2f} s: {'; '.join(said)}. Whatever is not named takes less than {WORTH_SAYING} %."
    if laps:
        shares = ", ".join(f"{100 * s / sum(laps.values()):.0f} % {stage}" for stage, s in laps.items())
        text += f" By stage: {shares}."
    return text


def reliability(found: dict[str, float], profiled: float) -> str:
    """What the profiler itself did to the figures, in words."""
    operators = sum(found.values()) - found[parts.REST]
    bounds = sorted((found[parts.REST] / sum(found.values()), 1 - operators / profiled))
    between = " and ".join(f"{100 * share:.0f} %" for share in bounds)
    return f"Under the profiler it took {profiled:.2f} s: {parts.REST} is between {between}."


def rows(found: dict[str, float]) -> list[dict]:
    """The table, in the order of the parts; those that the work does not have are left out."""
    total = sum(found.values())
    return [
        {"part": part, "percent": round(100 * seconds / total, 1), "milliseconds": round(1000 * seconds, 1)}
        for part, seconds in found.items()
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
        started = records.provenance(precision)
        name, work = stages(options.folder(flags, "0.5B"), precision, flags.new)[stage]()
        found, profiled, laps = measure(work, device)
        note = f"{summary(name, found, laps)} {reliability(found, profiled)}"
        run = {"section": stage, **started, "note": note, "records": rows(found)}
        print(f"\n## {stage}\n\n{records.conditions(run)}\n\n{note}\n\n{records.table(run['records'])}", flush=True)
        records.keep(flags.results, device, TIME, run)


if __name__ == "__main__":
    main()
