"""The run's log: one record per step in `metrics.jsonl`, and some of its metrics as a progress line.

Metrics that TRL has, too, are named as in TRL: loss, grad_norm, learning_rate, num_tokens, epoch, eval_loss, kl,
reward and others.
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

from r3lite.core import run_files
from r3lite.core.errors import explained
from r3lite.core.files import own_records
from r3lite.devices.live_tensors import MIB

if TYPE_CHECKING:  # loaded at run time for --track only
    from r3lite.training.tracking import Tracker

# Metrics that differ between repeated runs; all others are equal to the bit. The metrics `judge/` count the calls and
# the cost of one process. After a resume they differ, because verdicts of the first process are read from a cache; so
# are the documents of queries with --query-cache.
MEASURED = ("step_time", "tokens_per_second", "peak_memory_mib", "queries/cached_ratio")
MEASURED_GROUPS = ("time/", "judge/")
LINES = 20  # progress lines of a run whose stderr is a file
# The default format of tqdm without its estimate of the remaining time.
BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


def repeatable(record: dict) -> dict:
    """Returns a record without the metrics that differ between repeated runs: times, memory and cost."""
    metrics = {}
    for name, value in record.items():
        if name not in MEASURED and not name.startswith(MEASURED_GROUPS):
            metrics[name] = value
    return metrics


def peak_memory_mib(device: torch.device) -> float | None:
    """Returns the peak memory of this process: on CUDA that of PyTorch's allocator, else the resident memory.

    None if the system does not tell it.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB
    status = Path("/proc/self/status")
    if status.exists():  # Linux, where getrusage would count memory that the parent process once held
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):  # in KiB
                return int(line.split()[1]) / 1024
        return None
    try:
        import resource
    except ImportError:
        return _peak_memory_mib_on_windows()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":  # in bytes there, elsewhere in KiB
        return peak / MIB
    return peak / 1024


def _peak_memory_mib_on_windows() -> float | None:
    """Returns the peak resident memory of this process; None if Windows does not tell it."""
    import ctypes
    from ctypes import wintypes

    class Counters(ctypes.Structure):  # PROCESS_MEMORY_COUNTERS
        _fields_ = [
            ("size", wintypes.DWORD),
            ("page_faults", wintypes.DWORD),
            ("peak_resident", ctypes.c_size_t),
            ("resident", ctypes.c_size_t),
            ("peak_paged_pool", ctypes.c_size_t),
            ("paged_pool", ctypes.c_size_t),
            ("peak_nonpaged_pool", ctypes.c_size_t),
            ("nonpaged_pool", ctypes.c_size_t),
            ("page_file", ctypes.c_size_t),
            ("peak_page_file", ctypes.c_size_t),
        ]

    counters = Counters(size=ctypes.sizeof(Counters))
    current_process = ctypes.windll.kernel32.GetCurrentProcess
    current_process.restype = wintypes.HANDLE
    read_counters = ctypes.windll.psapi.GetProcessMemoryInfo
    read_counters.argtypes = [wintypes.HANDLE, ctypes.c_void_p, wintypes.DWORD]
    if not read_counters(current_process(), ctypes.byref(counters), counters.size):
        return None
    return counters.peak_resident / MIB


def with_perplexity(record: dict) -> dict:
    """Returns a record of SFT with the perplexity of each loss, exp(loss); losses are means over tokens, in nats.

    A perplexity that a float cannot hold is infinite, which the log writes as null.
    """
    record = dict(record)
    for loss, perplexity in (("loss", "perplexity"), ("eval_loss", "eval_perplexity")):
        if loss in record:
            try:
                record[perplexity] = math.exp(record[loss])
            except OverflowError:
                record[perplexity] = math.inf
    return record


def means_by_source(
    metric: str,
    parts: Mapping[str, torch.Tensor | float],
    tokens: Mapping[str, int],
) -> dict[str, float]:
    """Returns `metric`, the mean over all tokens, and as `METRIC/NAME` the mean over the tokens of each named source.

    `parts` has what each source's tokens contribute to the mean over all tokens, which is the sum of the parts.
    `tokens` has the number of each source's tokens.
    """
    token_count = sum(tokens.values())
    means = {metric: float(sum(parts.values()))}
    for name, part in sorted(parts.items()):
        if name:
            means[f"{metric}/{name}"] = float(part) * token_count / tokens[name]
    return means


# The metrics of the progress line in order, with their formats. Metrics that a record lacks are left out.
PROGRESS = {
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
    "peak_memory_mib": "{memory_kind} {:.0f} MiB",
}


class Clock:
    """Estimates the remaining time of a run by the mean time from step to step in this process.

    The first step takes longer, because kernels are loaded and memory is allocated. Its time is used only until the
    second step has ended.
    """

    def __init__(self, read_time: Callable[[], float] = time.perf_counter):
        self.read_time = read_time
        self.start = read_time()
        self.first_end: float | None = None  # the time at which the first step ended
        self.steps_since_first = 0

    def end_step(self, steps_left: int) -> float:
        """Counts a step that ends now; returns the estimated seconds of the `steps_left` steps after it."""
        step_end = self.read_time()
        if self.first_end is None:
            self.first_end = step_end
            return steps_left * (step_end - self.start)
        self.steps_since_first += 1
        return steps_left * (step_end - self.first_end) / self.steps_since_first


def writing(path: Path) -> contextlib.AbstractContextManager:
    """Returns a context that turns an OSError, as on a full disk, into an R3LiteError that names the file."""
    return explained(
        OSError, f"{path} cannot be written", "Free disk space; continue with --resume auto.", code="metrics-unwritable"
    )


def _plain(value):
    """Returns the value; instead of nan and inf, which JSON lacks, None, which is written as null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def memory_kind(device: torch.device) -> str:
    """Returns what `peak_memory_mib` measures, for the progress line: only "tensors" can be compared with the plan."""
    if device.type == "cuda":
        return "tensors"
    return "process"


def _progress_line(record: dict, memory_kind: str) -> str:
    """Returns the metrics of PROGRESS that a record has, in a line."""
    parts = []
    for name, form in PROGRESS.items():
        if record.get(name) is not None:
            parts.append(form.format(record[name], memory_kind=memory_kind))
    return "  ".join(parts)


class NoTracker:
    """The tracker of a run without --track."""

    def write(self, record: dict) -> None:
        pass

    def close(self) -> None:
        pass


NO_TRACKER = NoTracker()


class MetricsLog:
    """`metrics.jsonl` of a run that has taken `start` of its `total` steps, and its progress bar.

    On a terminal one bar is updated in place; if stderr is a file, about LINES lines are printed over the run. The
    `tracker` gets every record, too. `memory_kind` is what the function of this name returns.
    """

    def __init__(
        self,
        output: Path,
        start: int,
        total: int,
        label: str,
        tracker: "Tracker | NoTracker" = NO_TRACKER,
        memory_kind: str = "process",
    ):
        self.path = output / run_files.METRICS
        self.total = total
        self.label = label
        self.tracker = tracker
        self.memory_kind = memory_kind
        self.line_every = max(1, total // LINES)  # steps from one line to the next
        self.file = open(self.path, "a", encoding="utf-8", newline="\n")  # noqa: SIM115
        self.bar = tqdm(
            initial=start,
            total=total,
            desc=label,
            unit="step",
            disable=None,  # shows the bar on a terminal only
            bar_format=BAR,
        )
        self.clock = Clock()

    def write(self, record: dict) -> None:
        """Appends one step's record and shows it. The record of step 0 is of a validation before the first step."""
        step = record["step"]
        record = {name: _plain(value) for name, value in record.items()}
        with writing(self.path):
            self.file.write(json.dumps(record, ensure_ascii=False) + "\n")
            self.file.flush()
        self.tracker.write(record)
        line = _progress_line(record, self.memory_kind)
        if step == 0:
            self.clock = Clock()  # begins anew: the time of the validation does not count
        else:
            seconds_left = self.clock.end_step(self.total - step)
            if seconds_left:
                line += f"  ETA {tqdm.format_interval(seconds_left)}"
        self.bar.set_postfix_str(line, refresh=False)
        self.bar.update(0 if step == 0 else 1)
        has_line = step % self.line_every == 0 or step in (1, self.total)
        if self.bar.disable and has_line:
            print(f"{self.label} {step}/{self.total}  {line}", file=sys.stderr, flush=True)

    def sync(self) -> None:
        """Flushes the file to the disk, so that no checkpoint is newer than the log."""
        with writing(self.path):
            os.fsync(self.file.fileno())

    def close(self) -> None:
        self.bar.close()
        with writing(self.path):
            self.file.close()
        self.tracker.close()


class NoLog:
    """The log of all ranks but the first, which writes nothing."""

    def write(self, record: dict) -> None:
        pass

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


def read(path: Path) -> list[dict]:
    """Returns the records of a log. A last line that a kill cut off is left out.

    Raises R3LiteError if any other line is not a record with a step.
    """
    records, _ = _read(path)
    return records


def _read(path: Path) -> tuple[list[dict], bytes]:
    """Returns the records of a log, and the bytes of its last line if that was cut off, else empty bytes."""
    remedy = "Fix or remove the line, and run again."
    return own_records(path, "step", _is_record, "a training run", remedy)


def _is_record(record: dict) -> bool:
    return type(record.get("step")) is int  # isinstance would accept True


def read_up_to(path: Path, step: int) -> list[dict]:
    """Returns the records of a log up to a step: those that a resumed run keeps.

    Prints a note if the last line was cut off.
    """
    records, torn = _read(path)
    if torn:
        print(f"{path}: ignoring the incomplete last line", file=sys.stderr)
    return [record for record in records if record["step"] <= step]
