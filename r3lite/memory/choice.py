"""Chooses the settings with which a run fits into its budget.

These are the first whose predicted peak is within it, in an order that goes roughly from fast to small.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
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

SLACK = 0.02  # share of a budget that stays free for what the planner's formulas leave out
PASS_TOKENS = (8192, 4096, 2048)  # values of micro_batch_tokens
ROLLOUTS = (128, 64, 32, 16, 8, 4, 2, 1)  # values of rollout_batch_size
# Pairs of loss_chunk and mlp_tile, from the fastest to the smallest.
CHUNKS_AND_TILES = (
    (128, 512),
    (64, 512),
    (64, 128),
    (32, 64),
    (16, 32),
)
LENGTHS = (8192, 4096, 2048, 1024, 512, 256)  # values of --max-length that a remedy may propose
REMEDIES = 3  # the most remedies that an error lists
# One remedy leaves all of the user's settings to the plan except these two, which have remedies of their own.
KEPT_BY_REMEDIES = ("nf4", "stream_layers")


def candidates(w: Workload, fixed: dict[str, Any]) -> Iterator[Memory]:
    """Yields settings, roughly from those of the fastest run to those with the smallest peak.

    Settings in `fixed` keep their values. Full fine-tuning overrides two of them: no NF4, and all layers recomputed.
    """
    layers = w.model.num_hidden_layers
    if w.full_tuning:
        fixed = fixed | {"nf4": False, "recompute_layers": layers}

    def options(name: str, values: Sequence) -> Sequence:
        """Returns the values that a setting may have: the fixed one, or else `values`."""
        return [fixed[name]] if name in fixed else values

    recomputed_counts = [layers]
    # Streamed layers are always recomputed: when the backward pass comes to a layer, another one is in its memory.
    if w.trains and not fixed.get("stream_layers"):
        recomputed_counts = list(range(layers + 1))
    smallest_pass = w.pass_tokens
    larger_passes = {max(smallest_pass, tokens) for tokens in PASS_TOKENS}
    pass_sizes = sorted({smallest_pass} | larger_passes, reverse=True)
    # Of the values that are enough for all episodes, only the smallest is tried. The values are powers of two, so
    # exactly one of them is at least `episodes` and less than twice that.
    useful_rollouts = [value for value in ROLLOUTS if value < 2 * max(w.episodes, 1)]
    rollouts = options("rollout_batch_size", useful_rollouts)
    for quantized in options("nf4", [False, True]):
        base = Memory(nf4=quantized, loss_chunk=logprobs.CHUNK, mlp_tile=1024, offload=False)
        # From no recomputed layers to all, which cost a third of a step. Where only some layers are recomputed, only
        # the smallest passes are tried: recomputing fewer layers gains more than larger passes.
        for recomputed in options("recompute_layers", recomputed_counts):
            tried_passes = pass_sizes if recomputed in (0, layers) else [smallest_pass]
            for episodes in rollouts:
                for tokens in options("micro_batch_tokens", tried_passes):
                    changes = {
                        "recompute_layers": recomputed,
                        "micro_batch_tokens": tokens,
                        "rollout_batch_size": episodes,
                    }
                    yield replace(base, **(changes | fixed))
        # Smaller chunks and tiles and the offload are tried last, with all layers recomputed: beside kept activations
        # they save little.
        base = replace(base, recompute_layers=layers, micro_batch_tokens=smallest_pass)
        for offload in options("offload", [False, True] if w.on_cuda else [False]):
            for chunk, tile in CHUNKS_AND_TILES:
                for episodes in rollouts:
                    changes = {
                        "offload": offload,
                        "loss_chunk": chunk,
                        "mlp_tile": tile,
                        "rollout_batch_size": episodes,
                    }
                    yield replace(base, **(changes | fixed))


def choose(
    w: Workload,
    fixed: dict[str, Any],
    budget: int,
    models: Sequence[tuple[str, ModelConfig]] = (),
) -> Memory:
    """Returns the first of the `candidates` whose peak is within the budget (bytes).

    `fixed` has the settings that the user gave. If no settings fit, raises R3LiteError with changes that would help.
    One of these may be a smaller model: the first that fits of `models`, which begin with the largest.
    """
    smallest_peak = None
    for memory in candidates(w, fixed):
        size = peak(w, memory)
        if size <= budget * (1 - SLACK):
            return memory
        smallest_peak = size if smallest_peak is None else min(smallest_peak, size)
    assert smallest_peak is not None
    cause = f"this run needs at least {smallest_peak / MIB:,.0f} MiB, but the budget is {budget / MIB:,.0f} MiB"
    helpful = islice(chain(_remedies(w, fixed, budget, models), [_larger_budget(smallest_peak)]), REMEDIES)
    remedy = f"It would fit with {'; or '.join(helpful)}."
    raise R3LiteError(cause, f"{remedy} More processes do not help: each needs as much.", code="budget-too-small")


def _larger_budget(smallest_peak: int) -> str:
    """Returns the flag of the smallest budget that has room for a peak."""
    needed = int(smallest_peak / (1 - SLACK))
    mib = -(-needed // MIB)  # rounded up
    return f"--vram-budget {mib}MiB"


def _fits(w: Workload, fixed: dict[str, Any], budget: int) -> bool:
    limit = budget * (1 - SLACK)
    # The settings with the smallest peaks come last: if any fit, some of these do.
    return any(peak(w, memory) <= limit for memory in reversed([*candidates(w, fixed)]))


def _without(fixed: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in fixed.items() if name not in names}


def _remedies(
    w: Workload,
    fixed: dict[str, Any],
    budget: int,
    models: Sequence[tuple[str, ModelConfig]],
) -> Iterator[str]:
    """Yields changes each of which is enough to make the run fit, in words or as flags."""
    with_lora = replace(w, full_tuning=False, lora_r=LoraSettings.lora_r, targets=LoraSettings.lora_targets)
    if w.full_tuning and _fits(with_lora, fixed, budget):
        yield "LoRA instead of --no-lora"
    if fixed.get("nf4") is False and _fits(w, _without(fixed, ["nf4"]), budget):
        yield "--quantize nf4"
    layers = w.model.num_hidden_layers
    keeps_activations = fixed.get("recompute_layers", layers) < layers
    may_stream = not (w.full_tuning or fixed.get("stream_layers") or keeps_activations)
    streaming = {"nf4": True} | fixed | {"stream_layers": True}  # NF4 unless the user gave another value
    if may_stream and _fits(w, streaming, budget):
        yield "--stream-layers"
    loosened = [name for name in fixed if name not in KEPT_BY_REMEDIES]
    if loosened and _fits(w, _without(fixed, loosened), budget):
        planned = {"offload": "auto"}  # the value that leaves a setting to the plan; for all other settings `none`
        yield " ".join(f"{flag(name)} {planned.get(name, 'none')}" for name in loosened)
    for tokens in LENGTHS:
        if tokens < w.row_tokens and _fits(_shorter(w, tokens), fixed, budget):
            yield f"--max-length {tokens}"
            break
    for name, model in models:
        smaller = replace(w, model=model, packed=None)  # the NF4 weights at hand, if any, are those of `w.model`
        if model.hidden_size < w.model.hidden_size and _fits(smaller, fixed, budget):
            yield f"--model {name}"
            break


def _shorter(w: Workload, tokens: int) -> Workload:
    """Returns the same work with rows of `tokens` tokens."""
    shared = min(w.shared, tokens)
    if w.contexts:  # with --learn answer, the rows share all but their last turn, which is sampled
        shared = max(0, tokens - int(w.writes))
    return replace(w, row_tokens=tokens, reads=min(w.reads, tokens), shared=shared)
