"""Times the same work by several contestants, such as r3lite and transformers, who take turns in one process."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from r3lite.devices.live_tensors import LiveTensors

# Names of contestants.
OURS = "r3lite"
CAPTURED = ", as a CUDA graph"
GRAPH = OURS + CAPTURED
FLOOR = "floor"  # only the matrix products of the work
PEAK = "peak"  # the useful operations of the work, at the speed of a large matrix product
LIMITS = (FLOOR, PEAK)  # they show what the device can do at most, and are no rivals


@dataclass
class Contest:
    """Times the same work by several contestants.

    A contestant is a function that does the work once. It may return the seconds to be counted; else its call is timed.
    With a memory budget, the peak of live tensors of each contestant is measured first, and r3lite is compared with the
    fastest rival whose peak is within the budget.
    """

    name: str
    tokens: int  # that the work generates, encodes or learns from
    contestants: dict[str, Callable[[], object]]
    budget: float | None = None  # MiB
    facts: dict = field(default_factory=dict)  # further columns of every record, such as the corpus
    # Results of `run`, by contestant.
    seconds: dict[str, list[float]] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)  # MiB

    def run(self, repeats: int, device: str) -> None:
        """Times each contestant `repeats` times, by turns, after one time that is not counted.

        If there is a budget, the peaks are measured before.
        """
        if self.budget:
            self.peaks = {name: peak_mib(work) for name, work in self.contestants.items() if name not in LIMITS}
        for repeat in range(repeats + 1):
            for name, work in self.contestants.items():
                # r3lite turns cuDNN attention off; PyTorch's default is on.
                torch.backends.cuda.enable_cudnn_sdp(name != OURS)
                start = time.perf_counter()
                own_seconds = work()
                if device == "cuda":
                    torch.cuda.synchronize()
                seconds = time.perf_counter() - start
                if isinstance(own_seconds, float):
                    seconds = own_seconds
                if repeat > 0:  # the first one warms up
                    self.seconds.setdefault(name, []).append(seconds)

    def compared_with(self, medians: dict[str, float]) -> str:
        """Returns the name of the fastest rival whose peak is within the budget, or "none that fits"."""
        assert self.budget
        fitting = [name for name in medians if name not in (OURS, GRAPH, *LIMITS) and self.peaks[name] <= self.budget]
        return min(fitting, key=medians.__getitem__, default="none that fits")

    def results(self) -> list[dict]:
        """Returns a record of each contestant.

        tokens_per_second, seconds: by the median time
        spread: the range of its times, as a share of the median
        r3lite_is_faster_by: its time as a multiple of r3lite's
        of_floor, of_peak: its speed as a share of that limit's, if the limit took part
        peak_mib, and for r3lite budget_mib and compared_with: if there is a budget
        """
        medians = {name: statistics.median(times) for name, times in self.seconds.items()}
        records = []
        for name, times in self.seconds.items():
            records.append(
                {
                    "contest": self.name,
                    **self.facts,
                    "contestant": name,
                    "tokens_per_second": round(self.tokens / medians[name], 1),
                    "seconds": round(medians[name], 3),
                    "spread": round((max(times) - min(times)) / medians[name], 3),
                    "r3lite_is_faster_by": round(medians[name] / medians[OURS], 2),
                }
            )
            for limit in LIMITS:
                if limit in medians:
                    records[-1][f"of_{limit}"] = round(medians[limit] / medians[name], 3)
            if name in self.peaks:
                records[-1]["peak_mib"] = round(self.peaks[name], 1)
        if self.budget:
            ours = next(record for record in records if record["contestant"] == OURS)
            ours |= {"budget_mib": self.budget, "compared_with": self.compared_with(medians)}
        return records


def peak_mib(work: Callable[[], object]) -> float:
    """Returns the peak of live tensors in MiB over two calls: in the second one an optimizer has its moments."""
    with LiveTensors() as counter:
        work()
        work()
    return counter.peak_mib
