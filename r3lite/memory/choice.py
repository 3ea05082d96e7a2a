"""The settings that make a run fit into its budget: the fastest ones whose peak the planner puts within the budget."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from r3lite.core.config import flag
from r3lite.core.errors import R3LiteError
from r3lite.core.grant import Memory
from r3lite.devices.live_tensors import MIB
from r3lite.memory.planner import peak
from r3lite.memory.work import Workload
from r3lite.models import logprobs
from r3lite.models.causal_lm import ModelConfig
from r3lite.settings import LoraSettings

SLACK = 0.02  # of a budget, left free for what the formulas leave out
PASS_TOKENS = (8192, 4096, 2048)
ROLLOUTS = (128, 64, 32, 16, 8, 4, 2, 1)
# Tokens of a chunk of logits and of a tile of the MLP, from the fastest to the smallest.
SMALLER = (
    (128, 512),
    (64, 512),
    (64, 128),
    (32, 64),
    (16, 32),
)
LENGTHS = (8192, 4096, 2048, 1024, 512, 256)  # values of --max-length that a remedy may propose
REMEDIES = 3  # the most remedies that an error lists
# Settings with remedies of their own. The remedy that frees the other settings that the user gave keeps these.
KEPT_BY_REMEDIES = ("nf4", "stream_layers")


def candidates(w: Workload, fixed: dict[str, Any]) -> Iterator[Memory]:
    """Yields settings from the fastest to the smallest.

    Settings in `fixed` keep their values. Full fine-tuning overrides two of them: no NF4, and all layers recomputed.
    """

    def options(name: str, values: Sequence) -> Sequence:
        return [fixed[name]] if name in fixed else values

    layers = w.model.num_hidden_layers
    longest = w.pass_tokens
    # Streamed layers keep no activations: by the backward pass, which would use these, their weights have gone.
    if w.trains and not fixed.get("stream_layers"):
        recomputed_counts = range(layers + 1)
    else:
        recomputed_counts = range(layers, layers + 1)
    if w.full_tuning:
        fixed = fixed | {"nf4": False, "recompute_layers": layers}
    passes = sorted({longest, *(max(longest, tokens) for tokens in PASS_TOKENS)}, reverse=True)
    useful_rollouts = [rows for rows in ROLLOUTS if rows < 2 * max(w.episodes, 1)]
    rollouts = options("rollout_batch_size", useful_rollouts)
    for quantized in options("nf4", [False, True]):
        base = Memory(nf4=quantized, loss_chunk=logprobs.CHUNK, mlp_tile=1024, offload=False)
        # Recomputing costs a third of a step, more than anything that follows; small passes cost little.
        for recomputed in options("recompute_layers", recomputed_counts):
            varied = passes if recomputed in (0, layers) else passes[-1:]
            for rows in rollouts:
                for tokens in options("micro_batch_tokens", varied):
                    yield _with(base, fixed, recompute_layers=recomputed, micro_batch_tokens=tokens, rows=rows)
        base = replace(base, recompute_layers=layers, micro_batch_tokens=longest)
        for offload in options("offload", [False, True] if w.on_cuda else [False]):
            for chunk, tile in SMALLER:
                for rows in rollouts:
                    yield _with(base, fixed, offload=offload, loss_chunk=chunk, mlp_tile=tile, rows=rows)


def _with(base: Memory, fixed: dict[str, Any], rows: int, **changes: Any) -> Memory:
    """Returns `base` with `rows` episodes at a time and the other changes, but with the values of `fixed`."""
    return replace(base, **(changes | {"rollout_batch_size": rows} | fixed))


def choose(
    w: Workload,
    fixed: dict[str, Any],
    budget: int,
    models: Sequence[tuple[str, ModelConfig]] = (),
) -> Memory:
    """Returns the fastest settings whose peak is within the budget (bytes).

    `fixed` holds the settings that the user gave. If none fits, raises R3LiteError with the changes that would help; a
    smaller one of `models`, which are in falling order of size, may be one of them.
    """
    smallest_peak = None
    for memory in candidates(w, fixed):
        size = peak(w, memory)
        if size <= budget * (1 - SLACK):
            return memory
        smallest_peak = size if smallest_peak is None else min(smallest_peak, size)
    assert smallest_peak is not None
    cause = f"this run needs at least {smallest_peak / MIB:,.0f} MiB, but the budget is {budget / MIB:,.0f} MiB"
    helpful = [*_remedies(w, fixed, budget, models), _larger_budget(smallest_peak)]
    remedy = f"It would fit with {'; or '.join(helpful[:REMEDIES])}."
    raise R3LiteError(cause, f"{remedy} More processes do not help: each needs as much.", code="budget-too-small")


def _larger_budget(smallest_peak: int) -> str:
    return f"--vram-budget {-(-int(smallest_peak / (1 - SLACK)) // MIB)}MiB"


def _fits(w: Workload, fixed: dict[str, Any], budget: int) -> bool:
    limit = budget * (1 - SLACK)
    return any(peak(w, memory) <= limit for memory in candidates(w, fixed))


def _without(fixed: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in fixed.items() if name not in names}


def _remedies(
    w: Workload,
    fixed: dict[str, Any],
    budget: int,
    models: Sequence[tuple[str, ModelConfig]],
) -> list[str]:
    """Returns changes that help, each on its own."""
    helpful = []
    with_lora = replace(w, full_tuning=False, lora_r=LoraSettings.lora_r, targets=LoraSettings.lora_targets)
    if w.full_tuning and _fits(with_lora, fixed, budget):
        helpful.append("LoRA instead of --no-lora")
    if fixed.get("nf4") is False and _fits(w, _without(fixed, ["nf4"]), budget):
        helpful.append("--quantize nf4")
    layers = w.model.num_hidden_layers
    keeps_activations = fixed.get("recompute_layers", layers) < layers
    may_stream = not (w.full_tuning or fixed.get("stream_layers") or keeps_activations)
    if may_stream and _fits(w, {"nf4": True} | fixed | {"stream_layers": True}, budget):
        helpful.append("--stream-layers")
    loosened = [name for name in fixed if name not in KEPT_BY_REMEDIES]
    if loosened and _fits(w, _without(fixed, loosened), budget):
        free_values = {"offload": "auto"}  # what leaves a setting to the plan
        helpful.append(" ".join(f"{flag(name)} {free_values.get(name, 'none')}" for name in loosened))
    for tokens in LENGTHS:
        if tokens < w.row_tokens and _fits(_shorter(w, tokens), fixed, budget):
            helpful.append(f"--max-length {tokens}")
            break
    for name, model in models:
        smaller = replace(w, model=model, packed=None)
        if model.hidden_size < w.model.hidden_size and _fits(smaller, fixed, budget):
            helpful.append(f"--model {name}")
            break
    return helpful


def _shorter(w: Workload, tokens: int) -> Workload:
    shared = min(w.shared, tokens)
    if w.contexts:  # with --learn answer the rows share all but their last turn
        shared = max(0, tokens - int(w.writes))
    return replace(w, row_tokens=tokens, reads=min(w.reads, tokens), shared=shared)
