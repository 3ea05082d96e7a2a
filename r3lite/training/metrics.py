"""The run's log: one record a step in `metrics.jsonl`, and the same record as one progress line.

Metrics that TRL has too bear its names (loss, grad_norm, learning_rate, num_tokens, epoch, eval_loss, kl, reward, ...).
"""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from r3lite.core.errors import explained
from r3lite.core.files import own_records
from r3lite.core.spans import Spans, span
from r3lite.devices.live_tensors import MIB

if TYPE_CHECKING:
    from r3lite.training.tracking import Tracker

FILE = "metrics.jsonl"
# Metrics that differ from run to run; all others are equal to the bit in a repeated run. (`judge/` counts the calls and
# the cost of one process; verdicts from before a resume come from the cache.)
MEASURED = ("step_time", "tokens_per_second", "peak_memory_mib")
MEASURED_GROUPS = ("time/", "judge/")
LINES = 20  # progress lines of a run whose stderr is a file
BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"  # tqdm's, without its own guess of the time left


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
    """A record of SFT, whose losses are means over tokens in nats, with the perplexity of each: exp of the loss.

    A perplexity of n means that the model is as unsure as if it chose among n equally likely tokens. One beyond what a
    float holds is infinite, which the log writes as null.
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
    """A mean over the tokens of all sources, of which each source adds its share; and as `METRIC/NAME` the mean over
    the tokens of each source that has a name."""
    count, found = sum(tokens.values()), {metric: float(sum(shares.values()))}
    named = {name: float(share) for name, share in sorted(shares.items()) if name}
    return found | {f"{metric}/{name}": share * count / tokens[name] for name, share in named.items()}


# How a metric is shown in the progress line, in this order; those that a record lacks are left out.
SHOWN = {
    "loss": "loss {:.4f}",
    "eval_loss": "eval_loss {:.4f}",
    "reward": "reward {:.3f}",
    "eval/f1": "eval F1 {:.3f}",
    "kl": "kl {:.2g}",
    "entropy": "entropy {:.2f}",
    "grad_norm": "grad_norm {:.3g}",
    "learning_rate": "lr {:.2g}",
    "tokens_per_second": "{:.0f} tok/s",
    "peak_memory_mib": "{:.0f} MiB",
}


class Clock:
    """Tells how long a run still takes, by the mean time of this process's steps and of what lies between them.

    The first step takes longer, because kernels are loaded and memory is first asked for in it. It counts only while it
    is the only one.
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
    """JSON has no nan and no inf: they become null."""
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
            self.clock = Clock()  # a validation before the first step is no part of it
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
    """The log of a process that is not the first of its run: it writes nothing."""

    def __init__(self):
        pass

    write = sync = close = lambda self, *record: None


def read(path: Path) -> list[dict]:
    """The records of a log. A last line torn by a kill is left out; any other line without a step is refused."""
    return _read(path)[0]


def _read(path: Path) -> tuple[list[dict], bytes]:
    return own_records(path, "step", _is_record, "a training run", "Fix or remove the line, and run again.")


def _is_record(record: dict) -> bool:
    return type(record.get("step")) is int  # True is an int to isinstance


def up_to(path: Path, step: int) -> list[dict]:
    """The records of a log up to a step, which a run that goes on from there keeps; a torn last line is reported."""
    records, torn = _read(path)
    if torn:
        print(f"{path}: ignoring the incomplete last line", file=sys.stderr)
    return [record for record in records if record["step"] <= step]


@dataclass
class Stopwatch:
    """Seconds of each stage of a step, as `time/<stage>`; each is a span as well, if spans are recorded."""

    spans: Spans | None = None
    laps: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times the block."""
        start = time.perf_counter()
        with span(self.spans, name):
            yield
        self.laps[f"time/{name}"] = time.perf_counter() - start
