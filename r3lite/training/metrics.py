"""The run's log: one record per step in `metrics.jsonl`, and the same record as a progress line.

Metrics have TRL's names if it has them (loss, grad_norm, learning_rate, num_tokens, epoch, eval_loss, kl, reward, ...).
"""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from r3lite.core.errors import explained
from r3lite.core.files import own_records
from r3lite.devices.live_tensors import MIB

if TYPE_CHECKING:
    from r3lite.training.tracking import Tracker

FILE = "metrics.jsonl"
# Metrics that differ between repeated runs; all others are equal to the bit. (`judge/` counts the calls and the cost of
# one process; after a resume, earlier verdicts come from the cache.)
MEASURED = ("step_time", "tokens_per_second", "peak_memory_mib")
MEASURED_GROUPS = ("time/", "judge/")
LINES = 20  # progress lines of a run whose stderr is a file
BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"  # tqdm's, without its estimate of the remaining time


def repeatable(record: dict) -> dict:
    """A record without times, memory and cost."""
    return {k: v for k, v in record.items() if k not in MEASURED and not k.startswith(MEASURED_GROUPS)}


def peak_memory_mib(device: torch.device) -> float | None:
    """Peak memory of this process so far: of PyTorch's allocator on CUDA, else resident; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB
    status = Path("/proc/self/status")
    if status.exists():  # Linux; its getrusage would count what the parent process once held
        line = next((x for x in status.read_text(encoding="utf-8").splitlines() if x.startswith("VmHWM:")), None)
        return int(line.split()[1]) / 1024 if line else None
    try:
        import resource
    except ImportError:
        return _peak_memory_mib_on_windows()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MIB if sys.platform == "darwin" else peak / 1024


def _peak_memory_mib_on_windows() -> float | None:
    import ctypes
    from ctypes import wintypes

    sizes = ("peak_resident", "resident", "peak_paged", "paged", "peak_other", "other", "file", "peak_file")

    class Counters(ctypes.Structure):  # PROCESS_MEMORY_COUNTERS
        _fields_ = [("size", wintypes.DWORD), ("faults", wintypes.DWORD), *((n, ctypes.c_size_t) for n in sizes)]

    counters = Counters(size=ctypes.sizeof(Counters))
    current = ctypes.windll.kernel32.GetCurrentProcess
    current.restype = wintypes.HANDLE
    ask = ctypes.windll.psapi.GetProcessMemoryInfo
    ask.argtypes = [wintypes.HANDLE, ctypes.c_void_p, wintypes.DWORD]
    return counters.peak_resident / MIB if ask(current(), ctypes.byref(counters), counters.size) else None


def with_perplexity(record: dict) -> dict:
    """A record of SFT with the perplexity of each loss, exp(loss); losses are means over tokens, in nats.

    A perplexity that a float cannot hold is infinite, which the log writes as null.
    """
    for name in (name for name in ("loss", "eval_loss") if name in record):
        try:
            value = math.exp(record[name])
        except OverflowError:
            value = math.inf
        record = record | {name.replace("loss", "perplexity"): value}
    return record


def means_by_source(
    metric: str, shares: Mapping[str, torch.Tensor | float], tokens: Mapping[str, int]
) -> dict[str, float]:
    """`metric`, the sum of each source's share of the mean over all tokens; and as `METRIC/NAME` the mean over the
    tokens of each named source."""
    count, found = sum(tokens.values()), {metric: float(sum(shares.values()))}
    named = {name: float(share) for name, share in sorted(shares.items()) if name}
    return found | {f"{metric}/{name}": share * count / tokens[name] for name, share in named.items()}


# The metrics of the progress line in order, with their formats; those that a record lacks are left out.
SHOWN = {
    "loss": "loss {:.4f}",
    "eval_loss": "eval_loss {:.4f}",
    "reward": "reward {:.3f}",
    "groups/mixed": "mixed {:.0%}",
    "eval/f1": "eval F1 {:.3f}",
    "kl": "kl {:.2g}",
    "entropy": "entropy {:.2f}",
    "grad_norm": "grad_norm {:.3g}",
    "learning_rate": "lr {:.2g}",
    "tokens_per_second": "{:.0f} tok/s",
    "peak_memory_mib": "{:.0f} MiB",
}


class Clock:
    """Estimates the remaining time of a run by the mean time from step to step in this process.

    The first step takes longer, because kernels are loaded and memory is allocated. It counts only until the second.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self.now, self.start = now, now()
        self.first: float | None = None  # when the first step ended
        self.later = 0  # steps since then

    def left(self, steps: int) -> float:
        """Seconds that `steps` more steps take; called at the end of each step."""
        now = self.now()
        if self.first is None:
            self.first = now
            return steps * (now - self.start)
        self.later += 1
        return steps * (now - self.first) / self.later


def writing(path: Path) -> contextlib.AbstractContextManager:
    """Says which file could not be written in the `with` block, such as on a full disk."""
    return explained(OSError, f"{path} cannot be written", "Free disk space; continue with --resume auto.")


def _plain(value):
    """The value for JSON, which has no nan and no inf: they become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MetricsLog:
    """`metrics.jsonl` of a run that stands at `start` of `total` steps, and its progress bar.

    On a terminal one bar is updated in place; if stderr is a file, about LINES lines are printed over the run. A
    `tracker` gets every record, too.
    """

    def __init__(self, output: Path, start: int, total: int, label: str, tracker: "Tracker | None" = None):
        self.path, self.total, self.label, self.tracker = output / FILE, total, label, tracker
        self.every = max(1, total // LINES)
        self.file = open(self.path, "a", encoding="utf-8", newline="\n")  # noqa: SIM115
        self.bar = tqdm(initial=start, total=total, desc=label, unit="step", disable=None, bar_format=BAR)
        self.clock = Clock()

    def write(self, record: dict) -> None:
        """Appends one step's record and shows it. Step 0 is what was measured before the first."""
        record = {k: _plain(v) for k, v in record.items()}
        with writing(self.path):
            self.file.write(json.dumps(record, ensure_ascii=False) + "\n")
            self.file.flush()
        if self.tracker:
            self.tracker.write(record)
        if not record["step"]:
            self.clock = Clock()  # the validation before the first step does not count
        left = self.clock.left(self.total - record["step"]) if record["step"] else None
        line = "  ".join(form.format(record[k]) for k, form in SHOWN.items() if record.get(k) is not None)
        line += f"  ETA {tqdm.format_interval(left)}" if left else ""
        self.bar.set_postfix_str(line, refresh=False)
        self.bar.update(1 if record["step"] else 0)
        if self.bar.disable and (record["step"] % self.every == 0 or record["step"] in (1, self.total)):
            print(f"{self.label} {record['step']}/{self.total}  {line}", file=sys.stderr, flush=True)

    def sync(self) -> None:
        """Flushes the file to the disk, so that no checkpoint is newer than the log."""
        with writing(self.path):
            os.fsync(self.file.fileno())

    def close(self) -> None:
        self.bar.close()
        with writing(self.path):
            self.file.close()
        if self.tracker:
            self.tracker.close()


class NoLog(MetricsLog):
    """The log of all ranks but the first, which writes nothing."""

    def __init__(self):
        pass

    write = sync = close = lambda self, *record: None


def read(path: Path) -> list[dict]:
    """The records of a log. A last line that a kill cut off is left out; any other line without a step is an error."""
    return _read(path)[0]


def _read(path: Path) -> tuple[list[dict], bytes]:
    return own_records(path, "step", _is_record, "a training run", "Fix or remove the line, and run again.")


def _is_record(record: dict) -> bool:
    return type(record.get("step")) is int  # True is an int to isinstance


def up_to(path: Path, step: int) -> list[dict]:
    """The records of a log up to a step, which a resumed run keeps; warns of a last line that was cut off."""
    records, torn = _read(path)
    if torn:
        print(f"{path}: ignoring the incomplete last line", file=sys.stderr)
    return [record for record in records if record["step"] <= step]
