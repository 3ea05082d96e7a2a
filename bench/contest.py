"""A contest: the same work by several contestants, who take turns in one process."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from r3lite.devices.live_tensors import LiveTensors

OURS, FLOOR, PEAK = "r3lite", "floor", "peak"
LIMITS = (FLOOR, PEAK)  # what a device can do at the most; not rivals


@dataclass
class Contest:
    """The same work by several contestants; each is a function that does it once, and may return its own seconds.

    With a budget in MiB, the peak of live tensors of each is measured first, and the fastest of those that fit is the
    one that r3lite is compared with.
    """

    name: str
    tokens: int  # that the work makes or learns from
    contestants: dict[str, Callable[[], object]]
    budget: float | None = None
    facts: dict = field(default_factory=dict)  # columns of every record, such as the corpus
    seconds: dict[str, list[float]] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)  # MiB

    def run(self, repeats: int, device: str) -> None:
        """Measures the peaks if there is a budget, warms up, then lets the contestants take turns."""
        if self.budget:
            self.peaks = {n: peak_mib(work) for n, work in self.contestants.items() if n not in LIMITS}
        for i in range(repeats + 1):
            for name, work in self.contestants.items():
                torch.backends.cuda.enable_cudnn_sdp(name != OURS)  # rivals attend as PyTorch has it by default
                start = time.perf_counter()
                told = work()
                if device == "cuda":
                    torch.cuda.synchronize()
                if i:
                    seconds = told if isinstance(told, float) else time.perf_counter() - start
                    self.seconds.setdefault(name, []).append(seconds)

    def compared_with(self, medians: dict[str, float]) -> str:
        """The fastest rival whose peak is within the budget, or "none that fits"."""
        assert self.budget
        fit = [n for n in medians if n not in (OURS, *LIMITS) and self.peaks[n] <= self.budget]
        return min(fit, key=medians.__getitem__, default="none that fits")

    def results(self) -> list[dict]:
        """One record a contestant: tokens per second, the spread of its times, and its speed as a multiple.

        With a budget, also the peaks, and with whom r3lite is compared; if one of the device's limits took part, also
        the share of that one's speed.
        """
        medians, found = {name: statistics.median(times) for name, times in self.seconds.items()}, []
        for name, times in self.seconds.items():
            found.append(
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
                    found[-1][f"of_{limit}"] = round(medians[limit] / medians[name], 3)
            if name in self.peaks:
                found[-1]["peak_mib"] = round(self.peaks[name], 1)
        if self.budget:
            ours = next(record for record in found if record["contestant"] == OURS)
            ours |= {"budget_mib": self.budget, "compared_with": self.compared_with(medians)}
        return found


def peak_mib(work: Callable[[], object]) -> float:
    """Peak of live tensors in the second of two turns or before: by then an optimizer has its moments."""
    with LiveTensors() as counter:
        work()
        work()
    return counter.peak_mib
