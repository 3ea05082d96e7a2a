"""A plan: the budget that a run has, what was chosen for it, what the run will hold and how long it takes, by phase."""

import functools
import sys
from dataclasses import asdict, dataclass, replace

import torch

from r3lite.core.errors import R3LiteError
from r3lite.core.grant import Memory
from r3lite.devices.live_tensors import MIB
from r3lite.devices.machine import host_memory
from r3lite.devices.speed import speeds_of
from r3lite.memory import choice, duration, planner
from r3lite.memory.duration import Duration, in_words
from r3lite.memory.known_models import QWEN25
from r3lite.memory.work import Workload
from r3lite.memory.workloads import on_card
from r3lite.models.linear import linear
from r3lite.settings import MemorySettings, SamplingSettings
from r3lite.settings.common import budget_bytes

DEFAULT_BUDGET = 4 << 30
A_DAY = 86400  # seconds
UNKNOWN = "unknown, because the speed of the device is not known"
MARGIN = 256 << 20  # of a card's free memory, left to the desktop, which takes more and less of it


@dataclass(frozen=True)
class Plan:
    """What a run will hold, and what was chosen for it."""

    workload: Workload
    memory: Memory
    budget: int  # bytes
    fixed: dict  # the figures of `memory` that the user gave

    @functools.cached_property
    def duration(self) -> Duration | None:
        """From what is measured of the device of this machine, now if it was not; None if its speeds are not known."""
        work = self.workload
        if work.device and not work.speeds:
            work = replace(work, speeds=speeds_of(torch.device(work.device), linear))
        return duration.predict(work, self.memory)

    @property
    def peak(self) -> int:
        return planner.peak(self.workload, self.memory)

    @property
    def host(self) -> int:
        """Bytes of the host's memory for layers that are streamed; 0 if they are not."""
        return planner.host_bytes(self.workload, self.memory) if self.memory.stream_layers else 0

    @property
    def allocated(self) -> int:
        return planner.allocated(self.workload, self.memory)

    def table(self) -> str:
        """For people: MiB by phase and part, the peak, and what was chosen."""
        found = planner.phases(self.workload, self.memory)
        parts = list(dict.fromkeys(name for phase in found.values() for name in phase))
        lines = ["MiB".ljust(16) + "".join(f"{name:>10}" for name in found)]
        for part in parts:
            cells = (f"{phase[part] / MIB:>10,.0f}" if part in phase else f"{'':>10}" for phase in found.values())
            lines.append(part.ljust(16) + "".join(cells))
        lines.append("total".ljust(16) + "".join(f"{sum(p.values()) / MIB:>10,.0f}" for p in found.values()))
        top = max(found, key=lambda name: sum(found[name].values()))
        if self.memory.stream_layers:
            lines.append(
                f"host memory {self.host / MIB:,.0f} MiB: {self.workload.model.num_hidden_layers} layers"
                + ("" if self.workload.model.tie_word_embeddings else " and the embedding")
            )
        lines.append(f"peak {self.peak / MIB:,.0f} MiB ({top}) of a budget of {self.budget / MIB:,.0f} MiB")
        lines.append("chosen: " + ", ".join(f"{k} {v}" for k, v in asdict(self.memory).items()))
        return "\n".join([*lines, self.time_line()])

    def report(self) -> dict:
        """As JSON."""

        def mib(size: int) -> float:
            return round(size / MIB, 1)

        found = planner.phases(self.workload, self.memory)
        return {
            "budget_mib": mib(self.budget),
            "peak_mib": mib(self.peak),
            "fits": self.peak <= self.budget,
            "phases": {name: {k: mib(v) for k, v in parts.items()} for name, parts in found.items()},
            "chosen": asdict(self.memory),
            "seconds": self.duration and self.duration.report(),
        } | ({"host_mib": mib(self.host)} if self.memory.stream_layers else {})

    def line(self) -> str:
        """One line for the start of a run."""
        m, w = self.memory, self.workload
        parts = [f"{self.peak / MIB:,.0f} of {self.budget / MIB:,.0f} MiB"]
        parts += ["NF4"] if m.nf4 else []
        parts += [f"{self.host / MIB:,.0f} MiB of layers in host memory"] if m.stream_layers else []
        if w.trains:
            parts += [f"{m.recompute_layers} of {w.model.num_hidden_layers} layers recomputed"]
            parts += [f"{m.micro_batch_tokens} tokens per pass"]
        parts += [f"{min(m.rollout_batch_size, w.episodes)} episodes at a time"] if w.episodes else []
        return "memory plan: " + ", ".join(parts + (["offload"] if m.offload else []))

    def time_line(self) -> str:
        """One line for the start of a run."""
        if self.duration:
            return f"time: {self.duration.line()}"
        return f"time: {UNKNOWN}" + ("; plan --card predicts it for known GPUs" if self.workload.on_cuda else "")


def make_plan(workload: Workload, settings: MemorySettings, sampling: SamplingSettings | None = None) -> Plan:
    """The fastest settings that fit into the budget; R3LiteError with what would help if none do."""
    given, room = _given(settings, sampling), _budget(settings, workload)
    given |= {"nf4": True} if workload.packed else {}
    if settings.stream_layers:
        _check_streaming(workload, given)
    return Plan(workload, choice.choose(workload, given, room, list(QWEN25.items())), room, given)


def plan_for_card(
    name: str, workload: Workload, dtype: str, settings: MemorySettings, sampling: SamplingSettings | None = None
) -> Plan:
    """The plan of a workload on a card of the table, in the dtype of --dtype, whatever device is here.

    By default the budget is that of a run: 4 GiB, or the card's memory less a margin if that is less.
    """
    known = on_card(workload, name, dtype)
    if not settings.vram_budget:
        size = min(DEFAULT_BUDGET, known.speeds.memory - MARGIN)
        settings = replace(settings, vram_budget=f"{size / MIB}MiB")
    return make_plan(known, settings, sampling)


def _given(settings: MemorySettings, sampling: SamplingSettings | None = None) -> dict:
    """The figures of `Memory` that the user gave, by name."""
    names = ("recompute_layers", "micro_batch_tokens", "loss_chunk", "mlp_tile")
    given = {name: getattr(settings, name) for name in names}
    given["rollout_batch_size"] = sampling.rollout_batch_size if sampling else None
    given["nf4"] = {"auto": None, "none": False, "nf4": True}[settings.quantize]
    if settings.stream_layers:
        given |= {"stream_layers": True, "nf4": given["nf4"] is not False}
    given["offload"] = {"auto": None, "off": False, "on": True}[settings.offload]
    return {name: value for name, value in given.items() if value is not None}


def _check_streaming(w: Workload, given: dict) -> None:
    """Refuses layers that keep activations, and a machine whose memory does not hold the layers."""
    layers = w.model.num_hidden_layers
    if w.trains and given.get("recompute_layers", layers) < layers:
        cause = f"--recompute-layers is {given['recompute_layers']}, but --stream-layers recomputes all {layers}"
        raise R3LiteError(cause, "Pass --recompute-layers none.")
    needed, there = planner.host_bytes(w, Memory(**given)), host_memory() if w.device else None
    if there and needed > there:
        cause = f"--stream-layers needs {needed / MIB:,.0f} MiB of host memory, but there are {there / MIB:,.0f} MiB"
        raise R3LiteError(cause, "Pass a smaller --model, or --quantize nf4.")


def _budget(settings: MemorySettings, workload: Workload) -> int:
    """Bytes of --vram-budget; by default 4 GiB, or what is free on the card less a margin if that is less."""
    if settings.vram_budget:
        return budget_bytes(settings.vram_budget)
    if workload.on_cuda and torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        # What is free no longer has our own context in it, which is in the budget.
        return min(DEFAULT_BUDGET, free + workload.beside.context - MARGIN)
    return DEFAULT_BUDGET


def enforce(plan: Plan, device: torch.device) -> None:
    """On CUDA, the process gets no more than its budget, so that "fits" can be shown on a larger card."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        share = (plan.budget - plan.workload.beside.context) / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))  # not `device`: it refuses one without a number


def announce(plan: Plan) -> None:
    print(f"{plan.line()}\n{plan.time_line()}", file=sys.stderr)
    if plan.duration and plan.duration.seconds > A_DAY:
        message = f"{plan.duration.what} is predicted to take up to {in_words(plan.duration.seconds)}"
        print(f"warning: {message}. {plan.duration.remedy}", file=sys.stderr)
