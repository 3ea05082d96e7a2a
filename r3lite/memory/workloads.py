"""From a command's settings to a memory plan: what it computes, the budget that it has, and what it is granted."""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from r3lite.devices.precision import resolve_dtype
from r3lite.grant import Memory
from r3lite.memory import planner
from r3lite.memory.planner import MIB, Workload
from r3lite.models.lora import read_adapter_config
from r3lite.models.qwen2 import Qwen2Config
from r3lite.models.weights import read_config, resolve_folder
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.settings import (
    LengthSettings,
    LoraSettings,
    MemorySettings,
    ModelSettings,
    RetrievalSettings,
    RLSettings,
    SamplingSettings,
    SftSettings,
)

GIB = 1 << 30
DEFAULT_BUDGET = 4 * GIB
MARGIN = 256 << 20  # of a card's free memory, left to the desktop and to fragmentation
PROMPT = 512  # tokens of instructions and question, where documents are not more
MARKUP = 16  # tokens around a document
QWEN_TOKENS = 151_665  # ids of the tokenizer of Qwen2.5; its embedding has more rows
# Sizes of what can be planned for before it is downloaded.
_SIZES = {"3B": (2048, 11008, 36, 16, 2), "1.5B": (1536, 8960, 28, 12, 2), "0.5B": (896, 4864, 24, 14, 2)}
KNOWN = {
    f"Qwen/Qwen2.5-{size}{kind}": Qwen2Config(151_936, *shape)
    for kind in ("-Instruct", "")
    for size, shape in _SIZES.items()
}


@dataclass(frozen=True)
class Plan:
    """What a run will hold, and what was chosen for it."""

    workload: Workload
    memory: Memory
    budget: int

    @property
    def peak(self) -> int:
        return planner.peak(self.workload, self.memory)

    def table(self) -> str:
        """For people: MiB by phase and part, the peak, and what was chosen."""
        found = planner.phases(self.workload, self.memory)
        parts = list(dict.fromkeys(name for phase in found.values() for name in phase))
        lines = ["MiB".ljust(16) + "".join(f"{name:>10}" for name in found)]
        for part in parts:
            cells = (f"{phase[part] / MIB:>10,.0f}" if part in phase else f"{'':>10}" for phase in found.values())
            lines.append(part.ljust(16) + "".join(cells))
        lines.append("all".ljust(16) + "".join(f"{sum(p.values()) / MIB:>10,.0f}" for p in found.values()))
        top = max(found, key=lambda name: sum(found[name].values()))
        lines.append(f"peak {self.peak / MIB:,.0f} MiB ({top}) of a budget of {self.budget / MIB:,.0f} MiB")
        lines.append("chosen: " + ", ".join(f"{k} {v}" for k, v in asdict(self.memory).items()))
        return "\n".join(lines)

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
        }

    def line(self) -> str:
        """One line for the start of a run."""
        m, w = self.memory, self.workload
        parts = [f"{self.peak / planner.MIB:,.0f} of {self.budget / planner.MIB:,.0f} MiB"]
        parts += ["NF4"] if m.nf4 else []
        if w.trains:
            parts += [f"{m.recompute_layers} of {w.model.num_hidden_layers} layers recomputed"]
            parts += [f"{m.micro_batch_tokens} tokens a pass"]
        parts += [f"{min(m.rollout_batch_size, w.episodes)} episodes at a time"] if w.episodes else []
        return "memory plan: " + ", ".join(parts + (["offload"] if m.offload else []))


def shape_of(model: str) -> tuple[Qwen2Config, int]:
    """Sizes of a model and of its vocabulary, without its weights; those of Qwen2.5 are known offline."""
    known = {name.lower(): sizes for name, sizes in KNOWN.items()}  # the hub does not mind capitals
    if model.lower() in known and not Path(model).is_dir():
        return known[model.lower()], QWEN_TOKENS
    folder = resolve_folder(model)
    return read_config(folder), Tokenizer.load(folder).size


def sft_workload(
    model: ModelSettings, sft: SftSettings, lora: LoraSettings, longest: int | None = None, shared: int = 0
) -> Workload:
    """SFT over rows of at most `longest` tokens (by default --max-length), of which all begin with `shared` alike."""
    longest = min(sft.max_length, longest or sft.max_length)
    return Workload(
        **_base(model),
        **_adapter(model, lora),
        row_tokens=longest,
        shared=min(shared, longest),
        rows=sft.batch_size,
        step_rows=sft.batch_size * sft.gradient_accumulation,
    )


def rl_workload(
    model: ModelSettings,
    rl: RLSettings,
    lora: LoraSettings,
    lengths: LengthSettings,
    retrieval: RetrievalSettings,
    shared: int = 0,
    *,
    critic: bool,
) -> Workload:
    """A round whose episodes all reach --max-length and begin with `shared` equal tokens, with a critic or without."""
    episodes = rl.batch_size * rl.num_generations
    most = min(rl.micro_batch_size or episodes, episodes)
    return Workload(
        **_base(model),
        **_adapter(model, lora),
        **_sampling(lengths, retrieval, episodes),
        rows=min(most, rl.mini_batch_size),
        step_rows=min(rl.mini_batch_size, episodes),
        scored_rows=most,
        shared=min(shared, lengths.max_length),
        scores=bool(rl.kl_beta),
        adapters=2 if rl.kl_beta and model.adapter else 1,  # without one to start from, the bare base is the reference
        critic=critic,
    )


def evaluate_workload(
    model: ModelSettings, lengths: LengthSettings, retrieval: RetrievalSettings, questions: int
) -> Workload:
    """Answering so many questions."""
    adapter = _adapter(model, LoraSettings()) if model.adapter else {}
    return Workload(**_base(model), **adapter, **_sampling(lengths, retrieval, questions), trains=False)


def _base(model: ModelSettings) -> dict:
    sizes, vocabulary = shape_of(model.model)
    here = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    kind = model.device if model.device != "auto" else next((name for name, found in here.items() if found), "cpu")
    # A device that is not in this machine can be planned for: it has 16-bit numbers, whichever they are.
    elsewhere = kind != "cpu" and not here[kind] and model.dtype == "auto"
    element = 2 if elsewhere else resolve_dtype(model.dtype, torch.device(kind)).itemsize
    return {"model": sizes, "vocabulary": vocabulary, "element": element, "on_cuda": kind == "cuda"}


def _adapter(model: ModelSettings, lora: LoraSettings) -> dict:
    """Rank and projections: those of the adapter to start from, where there is one; it may be yet to be trained."""
    if model.adapter and (config := read_adapter_config(model.adapter)):
        return {"lora_r": config.r, "targets": config.targets}
    return {"lora_r": lora.lora_r, "targets": lora.lora_targets}


def _sampling(lengths: LengthSettings, retrieval: RetrievalSettings, episodes: int) -> dict:
    found = retrieval.top_k * (lengths.max_document_tokens + MARKUP) if retrieval.retriever != "none" else 0
    reads = max(1, min(lengths.max_length - lengths.max_new_tokens, max(PROMPT, found)))
    retrieves = retrieval.retriever != "none"
    return {"episodes": episodes, "row_tokens": lengths.max_length, "reads": reads, "retrieves": retrieves}


def fixed(settings: MemorySettings, sampling: SamplingSettings | None = None) -> dict:
    """What the user decided, under the names of `Memory`."""
    names = ("recompute_layers", "micro_batch_tokens", "loss_chunk", "mlp_tile")
    given = {name: getattr(settings, name) for name in names}
    given["rollout_batch_size"] = sampling.rollout_batch_size if sampling else None
    given["nf4"] = {"auto": None, "none": False, "nf4": True}[settings.quantize]
    given["offload"] = {"auto": None, "off": False, "on": True}[settings.offload]
    return {name: value for name, value in given.items() if value is not None}


def budget(settings: MemorySettings, on_cuda: bool) -> int:
    """Bytes of --vram-budget; by default 4 GiB, or what is free on the card less a margin where that is less."""
    if settings.vram_budget:
        return planner.budget_bytes(settings.vram_budget)
    if on_cuda and torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        # What is free no longer has our own context in it, which is in the budget.
        return min(DEFAULT_BUDGET, free + planner.CUDA_CONTEXT - MARGIN)
    return DEFAULT_BUDGET


def make_plan(workload: Workload, settings: MemorySettings, sampling: SamplingSettings | None = None) -> Plan:
    """The fastest settings that fit; R3LiteError with what would make it fit, where nothing does."""
    given, room = fixed(settings, sampling), budget(settings, workload.on_cuda)
    return Plan(workload, planner.choose(workload, given, room, list(KNOWN.items())), room)


def enforce(plan: Plan, device: torch.device) -> None:
    """On CUDA, the process gets no more than its budget, so that "fits" can be shown on a larger card."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        share = (plan.budget - planner.CUDA_CONTEXT) / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)


def announce(plan: Plan) -> None:
    print(plan.line(), file=sys.stderr)
