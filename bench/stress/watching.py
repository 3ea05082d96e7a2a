"""Watches a process from outside: memory, descriptors, threads, files and speed; checks that they stay the same."""

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.serving import computed
from r3lite.core import run_files
from r3lite.core.files import shipped
from r3lite.devices.live_tensors import MIB

ROOT = Path(__file__).parent.parent.parent
WORLD = shipped("data", "world")
SNAPSHOT_INTERVAL = 0.5  # seconds
MAX_GROWTH = 1.02  # largest ratio of late to early memory that is no growth
MIN_SPEED_RATIO = 0.97  # smallest ratio of late to early speed that is no slowdown
TINY = ["--preset", "tiny", "--dtype", "fp32"]


@dataclass(frozen=True)
class Snapshot:
    """The state of a process at one moment."""

    done: int  # steps or requests so far
    work: float  # tokens or requests so far
    seconds: float  # CPU time so far
    rss_mib: float
    descriptors: int
    threads: int
    files: int  # in the folder of the process
    yardstick: float  # CPU seconds of a fixed amount of work in the watching process: more on a busy machine


def yardstick() -> float:
    """Returns the CPU seconds that this process takes for a fixed amount of work in Python and in memory."""
    start = time.process_time()
    for _ in range(4):
        sum(i * i for i in range(20_000))
        bytes(range(256)) * 8192
    return time.process_time() - start


def take_snapshot(pid: int, folder: Path, read_progress: Callable[[], tuple[int, float]]) -> Snapshot | None:
    """Returns the state of a process; None if it has ended. `read_progress` returns its steps and its work so far."""
    try:
        resident_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        rss_mib = resident_pages * os.sysconf("SC_PAGE_SIZE") / MIB
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        threads = len(os.listdir(f"/proc/{pid}/task"))
        done, work = read_progress()
        files = sum(path.is_file() for path in folder.rglob("*"))
        return Snapshot(
            done=done,
            work=work,
            seconds=computed(pid),
            rss_mib=rss_mib,
            descriptors=descriptors,
            threads=threads,
            files=files,
            yardstick=yardstick(),
        )
    except (OSError, IndexError):
        return None


def progress_reader(folder: Path) -> Callable[[], tuple[int, float]]:
    """Returns a function that returns the steps and tokens of a training run so far, read from its metrics.

    Each call reads only the lines that were written since the last one.
    """
    step = 0
    tokens = 0.0
    position = 0  # bytes of the file that have been read

    def read_progress() -> tuple[int, float]:
        nonlocal step, tokens, position
        path = folder / run_files.METRICS
        if path.exists():
            with open(path, "rb") as file:
                file.seek(position)
                for line in file.read().splitlines(keepends=True):
                    if line.endswith(b"\n"):  # else the process is still writing it
                        record = json.loads(line)
                        step = record["step"]
                        tokens = record["num_tokens"]
                        position += len(line)
        return step, tokens

    return read_progress


def verdict(snapshots: list[Snapshot], total: int) -> dict:
    """Compares the second tenth of a run of `total` steps with its last tenth.

    Returns the medians of both, whether the run held (nothing grew, and it did not become slower), and why not.
    """
    under_way = [
        snapshot for snapshot in snapshots if snapshot.done < total
    ]  # not while it writes its results and ends
    early = [snapshot for snapshot in under_way if total * 1 / 10 <= snapshot.done <= total * 2 / 10]
    late = [snapshot for snapshot in under_way if total * 9 / 10 <= snapshot.done <= total * 10 / 10]
    if len(early) < 2 or len(late) < 2:
        done = snapshots[-1].done if snapshots else 0
        return {"done": done, "total": total, "held": False, "why": ["it did not get far"]}
    result: dict = {"done": snapshots[-1].done, "total": total, "looks": len(snapshots)}
    for name in ("rss_mib", "descriptors", "threads", "files"):
        result[name] = [_median(early, name), _median(late, name)]
    early_rate = _work_per_second(early)
    late_rate = _work_per_second(late)
    result["per_second_computed"] = [round(early_rate, 1), round(late_rate, 1)]
    early_pace = _median(early, "yardstick")
    late_pace = _median(late, "yardstick")
    result["yardstick_ms"] = [round(1000 * early_pace, 2), round(1000 * late_pace, 2)]
    # Work per yardstick instead of per second, so that a machine that became busy does not look like a slower process.
    result["speed_ratio"] = round(late_rate * late_pace / (early_rate * early_pace), 3)
    why = []
    if result["rss_mib"][1] > MAX_GROWTH * result["rss_mib"][0]:
        why.append("rss_mib grew")
    for name in ("descriptors", "threads", "files"):
        if result[name][1] > result[name][0]:
            why.append(f"{name} grew")
    if result["speed_ratio"] < MIN_SPEED_RATIO:
        why.append("it became slower")
    return result | {"held": not why, "why": why}


def _median(snapshots: list[Snapshot], name: str) -> float:
    return statistics.median(getattr(snapshot, name) for snapshot in snapshots)


def _work_per_second(snapshots: list[Snapshot]) -> float:
    """Returns the work per second of CPU time."""
    first = snapshots[0]
    last = snapshots[-1]
    return (last.work - first.work) / (last.seconds - first.seconds)


def watch_command(command: list[str], folder: Path) -> tuple[list[Snapshot], int]:
    """Runs a training command to its end; returns snapshots of it, and its exit status.

    `folder` is its output folder; its own output goes to a file beside that with the suffix .log.
    """
    snapshots = []
    read_progress = progress_reader(folder)
    with open(folder.with_suffix(".log"), "w") as log:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        while process.poll() is None:
            snapshot = take_snapshot(process.pid, folder, read_progress)
            if snapshot:
                snapshots.append(snapshot)
            time.sleep(SNAPSHOT_INTERVAL)
    return snapshots, process.returncode
