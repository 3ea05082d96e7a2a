"""A process watched from outside while it works: memory, descriptors, threads, files, speed; and whether they held."""

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
EVERY = 0.5  # seconds between two looks
MOST_GROWTH = 1.02
LEAST_SPEED = 0.97
TINY = ["--preset", "tiny", "--dtype", "fp32"]


@dataclass(frozen=True)
class Look:
    """What a process was at one moment; `done` are the steps or requests so far, `work` its tokens or requests."""

    done: int
    work: float
    seconds: float  # computed
    rss_mib: float
    descriptors: int
    threads: int
    files: int
    yardstick: float  # seconds that the same work takes this process: more on a busy machine


def yardstick() -> float:
    """Seconds computed for work that is always the same, in Python and in memory."""
    start = time.process_time()
    for _ in range(4):
        sum(i * i for i in range(20_000))
        bytes(range(256)) * 8192
    return time.process_time() - start


def look(pid: int, folder: Path, done: Callable[[], tuple[int, float]]) -> Look | None:
    """None once the process has ended."""
    try:
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB
        open_now, threads = len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))
        count, work = done()
        files = sum(path.is_file() for path in folder.rglob("*"))
        return Look(count, work, computed(pid), resident, open_now, threads, files, yardstick())
    except (OSError, IndexError):
        return None


def logged(folder: Path) -> Callable[[], tuple[int, float]]:
    """Steps and tokens of a run, from what its log has got since the last call."""
    seen = [0, 0.0, 0]

    def done() -> tuple[int, float]:
        path = folder / run_files.METRICS
        if path.exists():
            with open(path, "rb") as file:
                file.seek(seen[2])
                for line in file.read().splitlines(keepends=True):
                    if line.endswith(b"\n"):
                        record = json.loads(line)
                        seen[:] = record["step"], record["num_tokens"], seen[2] + len(line)
        return seen[0], seen[1]

    return done


def verdict(looks: list[Look], total: int) -> dict:
    """The second and the last tenth side by side, and what does not hold."""
    under_way = [x for x in looks if x.done < total]  # not while it writes its results and ends
    tenths = [[x for x in under_way if total * i / 10 <= x.done <= total * (i + 1) / 10] for i in range(10)]
    early, late = tenths[1], tenths[9]
    if len(early) < 2 or len(late) < 2:
        return {"done": looks[-1].done if looks else 0, "total": total, "held": False, "why": ["it did not get far"]}
    found: dict = {"done": looks[-1].done, "total": total, "looks": len(looks)}
    for name in ("rss_mib", "descriptors", "threads", "files"):
        found[name] = [statistics.median(getattr(x, name) for x in some) for some in (early, late)]
    rates = [(some[-1].work - some[0].work) / (some[-1].seconds - some[0].seconds) for some in (early, late)]
    found["per_second_computed"] = [round(rate, 1) for rate in rates]
    pace = [statistics.median(x.yardstick for x in some) for some in (early, late)]
    found["yardstick_ms"] = [round(1000 * seconds, 2) for seconds in pace]
    rates = [rate * seconds for rate, seconds in zip(rates, pace, strict=True)]
    found["speed_ratio"] = round(rates[1] / rates[0], 3)
    why = ["rss_mib grew"] * (found["rss_mib"][1] > MOST_GROWTH * found["rss_mib"][0])
    why += [f"{n} grew" for n in ("descriptors", "threads", "files") if found[n][1] > found[n][0]]
    why += ["it became slower"] if found["speed_ratio"] < LEAST_SPEED else []
    return found | {"held": not why, "why": why}


def watched(command: list[str], folder: Path, total: int) -> tuple[list[Look], int]:
    """Looks at a command until it ends, and its exit status."""
    looks, done = [], logged(folder)
    with open(folder.with_suffix(".log"), "w") as log:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        while process.poll() is None:
            if found := look(process.pid, folder, done):
                looks.append(found)
            time.sleep(EVERY)
    return looks, process.returncode
