"""A plan: a run's budget, the settings chosen for it, and the memory and time that each phase of the run takes."""

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
from r3lite.memory.parameters import host_bytes
from r3lite.memory.work import Workload
from r3lite.memory.workloads import on_card
from r3lite.models.linear import linear
from r3lite.models.masked_pack import has_masked_packs
from r3lite.settings import MemorySettings, SamplingSettings
from r3lite.settings.common import budget_bytes

DEFAULT_BUDGET = 4 << 30
HALF_AN_HOUR = 1800  # seconds
A_DAY = 86400
UNKNOWN = "unknown, because the speed of the device is not known"
WIDTH = 16  # characters of the table's first column
COLUMN = 10  # characters of each other column of the table
MARGIN = 256 << 20  # bytes of a card's free memory that are left to the desktop, which may come to use more


@dataclass(frozen=True)
class Plan:
    """The settings that were chosen for a run, and the memory and time that it takes with them."""

    workload: Workload
    memory: Memory
    budget: int  # bytes
    fixed: dict  # the figures of `memory` that the user gave, by name

    @functools.cached_property
    def duration(self) -> Duration | None:
        """The predicted time, from speeds that are measured now if the device is here; None if they are not known."""
        work = self.workload
        if work.device and not work.speeds:
            work = replace(work, speeds=speeds_of(torch.device(work.device), work.dtype, linear))
        return duration.predict(work, self.memory)

    @property
    def peak(self) -> int:
        """The most bytes that the run holds at once on its device; on CUDA those beside tensors are included."""
        return planner.peak(self.workload, self.memory)

    @property
    def host(self) -> int:
        """Bytes of the host's memory for layers that are streamed; 0 if they are not."""
        if not self.memory.stream_layers:
            return 0
        return host_bytes(self.workload, self.memory)

    @property
    def allocated(self) -> int:
        """The most bytes of tensors that the run holds at once on its device."""
        return planner.allocated(self.workload, self.memory)

    def table(self) -> str:
        """Returns a table for people: MiB by phase and part, the peak, and what was chosen."""
        phases = planner.phases(self.workload, self.memory)
        totals = {name: sum(parts.values()) for name, parts in phases.items()}
        part_names = dict.fromkeys(part for parts in phases.values() for part in parts)
        lines = ["MiB".ljust(WIDTH) + "".join(f"{name:>{COLUMN}}" for name in phases)]
        for part in part_names:
            cells = (_cell(parts.get(part)) for parts in phases.values())
            lines.append(part.ljust(WIDTH) + "".join(cells))
        cells = (_cell(total) for total in totals.values())
        lines.append("total".ljust(WIDTH) + "".join(cells))
        if self.memory.stream_layers:
            model = self.workload.model
            embedding = "" if model.tie_word_embeddings else " and the embedding"
            lines.append(f"host memory {self.host / MIB:,.0f} MiB: {model.num_hidden_layers} layers{embedding}")
        highest_phase = max(totals, key=totals.__getitem__)
        lines.append(f"peak {self.peak / MIB:,.0f} MiB ({highest_phase}) of a budget of {self.budget / MIB:,.0f} MiB")
        figures = (f"{name} {value}" for name, value in asdict(self.memory).items())
        lines.append("chosen: " + ", ".join(figures))
        lines.append(self.time_line())
        return "\n".join(lines)

    def report(self) -> dict:
        """Returns the plan as JSON values."""
        phases = {}
        for name, parts in planner.phases(self.workload, self.memory).items():
            phases[name] = {part: _mib(size) for part, size in parts.items()}
        record = {
            "budget_mib": _mib(self.budget),
            "peak_mib": _mib(self.peak),
            "fits": self.peak <= self.budget,
            "phases": phases,
            "chosen": asdict(self.memory),
            "seconds": self.duration.report() if self.duration else None,
        }
        if self.memory.stream_layers:
            record["host_mib"] = _mib(self.host)
        return record

    def line(self) -> str:
        """Returns one line on memory for the start of a run."""
        m = self.memory
        w = self.workload
        parts = [f"{self.peak / MIB:,.0f} of {self.budget / MIB:,.0f} MiB"]
        if not w.on_cuda:
            parts = [f"tensors {parts[0]} (the process takes more)"]
        parts.append(w.dtype)
        if m.nf4:
            parts.append("NF4")
        if m.stream_layers:
            parts.append(f"{self.host / MIB:,.0f} MiB of layers in host memory")
        if w.trains:
            parts.append(f"{m.recompute_layers} of {w.model.num_hidden_layers} layers recomputed")
            parts.append(f"{m.micro_batch_tokens} tokens per pass")
        if w.episodes:
            parts.append(f"{min(m.rollout_batch_size, w.episodes)} episodes at a time")
        if m.offload:
            parts.append("offload")
        return "memory plan: " + ", ".join(parts)

    def time_line(self) -> str:
        """Returns one line on time for the start of a run."""
        if self.duration:
            return f"time: {self.duration.line()}"
        line = f"time: {UNKNOWN}"
        if self.workload.on_cuda:
            line += "; plan --card predicts it for known GPUs"
        length = duration.run_length(self.workload)
        if length:
            line += f". The run has {length}"
        return line


def _cell(size: int | None) -> str:
    """Returns a size in MiB, or an empty cell."""
    text = "" if size is None else f"{size / MIB:,.0f}"
    return text.rjust(COLUMN)


def _mib(size: int) -> float:
    return round(size / MIB, 1)


def make_plan(workload: Workload, settings: MemorySettings, sampling: SamplingSettings | None = None) -> Plan:
    """Returns a plan with the fastest settings that fit into the budget.

    Raises R3LiteError if none fit, or if a setting cannot work with this model or on this device.
    """
    fixed = _fixed(settings, sampling)
    if workload.packed:
        fixed["nf4"] = True
    budget = _budget(settings, workload)
    if settings.stream_layers:
        _check_streaming(workload, fixed)
    if workload.captures:
        _check_graphs(workload)
    memory = choice.choose(workload, fixed, budget, list(QWEN25.items()))
    return Plan(workload, memory, budget, fixed)


def plan_for_card(
    name: str, workload: Workload, dtype: str, settings: MemorySettings, sampling: SamplingSettings | None = None
) -> Plan:
    """Returns the plan of a workload on a card of the table, in the dtype of --dtype, whatever device is here.

    By default the budget is that of a run: 4 GiB, or the card's memory less a margin if that is less.
    """
    work_on_card = on_card(workload, name, dtype)
    if not settings.vram_budget:
        size = min(DEFAULT_BUDGET, work_on_card.speeds.memory - MARGIN)
        settings = replace(settings, vram_budget=f"{size / MIB}MiB")
    return make_plan(work_on_card, settings, sampling)


def _fixed(settings: MemorySettings, sampling: SamplingSettings | None) -> dict:
    """Returns the figures of `Memory` that the user gave, by name."""
    names = ("recompute_layers", "micro_batch_tokens", "loss_chunk", "mlp_tile")
    values = {name: getattr(settings, name) for name in names}
    values["rollout_batch_size"] = sampling.rollout_batch_size if sampling else None
    values["nf4"] = {"auto": None, "none": False, "nf4": True}[settings.quantize]
    if settings.stream_layers:
        values["stream_layers"] = True
        values["nf4"] = settings.quantize != "none"  # streamed layers are in NF4 by default
    values["offload"] = {"auto": None, "off": False, "on": True}[settings.offload]
    return {name: value for name, value in values.items() if value is not None}


def _check_streaming(w: Workload, fixed: dict) -> None:
    """Raises R3LiteError if layers are to keep activations, or if this machine's memory is too small for the layers."""
    layers = w.model.num_hidden_layers
    if w.trains and fixed.get("recompute_layers", layers) < layers:
        cause = f"--recompute-layers is {fixed['recompute_layers']}, but --stream-layers recomputes all {layers}"
        raise R3LiteError(cause, "Pass --recompute-layers none.", code="recompute-with-streaming")
    available = host_memory() if w.device else None  # without a device the plan is for another machine
    needed = host_bytes(w, Memory(**fixed))
    if available and needed > available:
        cause = f"--stream-layers needs {needed / MIB:,.0f} MiB of host memory, "
        cause += f"but there are {available / MIB:,.0f} MiB"
        raise R3LiteError(cause, "Pass a smaller --model, or --quantize nf4.", code="host-memory")


def _check_graphs(w: Workload) -> None:
    """Raises R3LiteError if the passes of SFT cannot be captured as CUDA graphs."""
    if not w.on_cuda:
        cause = "--cuda-graphs needs a CUDA GPU"
        raise R3LiteError(cause, "Remove --cuda-graphs, or pass --device cuda.", code="graphs-device")
    if not has_masked_packs(w.model):
        cause = "--cuda-graphs does not work for models with convolutions (LFM2, Qwen3.5)"
        raise R3LiteError(cause, "Remove --cuda-graphs.", code="graphs-family")


def _budget(settings: MemorySettings, workload: Workload) -> int:
    """Returns the bytes of --vram-budget; by default 4 GiB, or what is free on a card less a margin if that is less."""
    if settings.vram_budget:
        return budget_bytes(settings.vram_budget)
    if workload.on_cuda and torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        # The CUDA context of this process is no longer free memory, but the budget includes it.
        return min(DEFAULT_BUDGET, free + workload.beside.context - MARGIN)
    return DEFAULT_BUDGET


def enforce(plan: Plan, device: torch.device) -> None:
    """On CUDA, makes PyTorch refuse this process more memory than the budget.

    So a run on a larger card shows whether it would fit on a card with this much memory.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        share = (plan.budget - plan.workload.beside.context) / total
        # `device` is not passed: the function refuses a device without a number.
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))


def announce(plan: Plan) -> None:
    """Prints the plan in one or two lines, and a warning if a step takes more than a day.

    The time is left out if it is only an upper bound and says little: for a server, which does not sample all its
    answers at once, and for evaluations and runs with short steps, which soon show how long they take.
    """
    print(plan.line(), file=sys.stderr)
    predicted = plan.duration
    says_little = False
    if predicted and predicted.is_upper_bound:
        says_little = predicted.seconds < HALF_AN_HOUR or not plan.workload.trains
    if not says_little:
        print(plan.time_line(), file=sys.stderr)
    if predicted and predicted.seconds > A_DAY:
        message = f"{predicted.unit} is predicted to take about {in_words(predicted.seconds)}"
        print(f"warning: {message}. {predicted.remedy}", file=sys.stderr)
