"""The settings that make a run fit into its budget: the fastest whose peak, as the planner tells it, is within it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from r3lite.core.config import flag
from r3lite.core.errors import R3LiteError
from r3lite.core.grant import Memory
from r3lite.devices.live_tensors import MIB
from r3lite.memory.planner import peak
from r3lite.memory.work import Workload
from r3lite.models import logprobs
from r3lite.models.causal_lm import ModelConfig

SLACK = 0.02  # of a budget, left free for what the formulas leave out


def candidates(w: Workload, fixed: dict) -> Iterator[Memory]:
    """Settings from the fastest to the smallest. What is `fixed` is not varied, but for what full fine-tuning needs."""

    def options(name: str, values: list) -> list:
        return [fixed[name]] if name in fixed else values

    L, longest = w.model.num_hidden_layers, w.pass_tokens
    # Streamed layers keep no activations: their weights are not there any more when these would be used.
    every = list(range(L + 1)) if w.trains and not fixed.get("stream_layers") else [L]
    fixed = fixed | ({"nf4": False, "recompute_layers": L} if w.full else {})
    passes = sorted({max(longest, t) for t in (8192, 4096, 2048, longest)}, reverse=True)
    rollouts = [r for r in (128, 64, 32, 16, 8, 4, 2, 1) if r < 2 * max(w.episodes, 1)]
    for quantized in options("nf4", [False, True]):
        # Recomputing costs a third of a step, more than anything that follows; small passes cost little.
        for layers in options("recompute_layers", every):
            yield from (
                replace(Memory(quantized, layers, tokens, logprobs.CHUNK, 1024, False, rows), **fixed)
                for rows in options("rollout_batch_size", rollouts)
                for tokens in options("micro_batch_tokens", passes if layers in (0, L) else passes[-1:])
            )
        for offload in options("offload", [False, True] if w.on_cuda else [False]):
            for chunk, tile in ((128, 512), (64, 512), (64, 128), (32, 64), (16, 32)):
                for rows in options("rollout_batch_size", rollouts):
                    yield replace(Memory(quantized, L, longest, chunk, tile, offload, rows), **fixed)


def choose(w: Workload, fixed: dict, budget: int, models: Sequence[tuple[str, ModelConfig]] = ()) -> Memory:
    """The fastest settings whose peak is within the budget (bytes); `fixed` holds those that the user gave.

    If none fits, raises R3LiteError with the changes that would help; a smaller one of `models`, which are in
    falling order of size, may be one of them.
    """
    least = None
    for memory in candidates(w, fixed):
        size = peak(w, memory)
        if size <= budget * (1 - SLACK):
            return memory
        least = size if least is None else min(least, size)
    cause = f"this run needs at least {least / MIB:,.0f} MiB, but the budget is {budget / MIB:,.0f} MiB"
    remedy = f"It would fit with {'; or '.join(_remedies(w, fixed, budget, least, models))}."
    raise R3LiteError(cause, f"{remedy} More processes do not help: each needs as much.")


def _remedies(
    w: Workload, fixed: dict, budget: int, least: int, models: Sequence[tuple[str, ModelConfig]]
) -> list[str]:
    """Up to three changes that help, each on its own; `least` bytes are taken without any."""

    def fits(work: Workload, given: dict) -> bool:
        return any(peak(work, m) <= budget * (1 - SLACK) for m in candidates(work, given))

    found = ["LoRA instead of --no-lora"] if w.full and fits(replace(w, full=False, lora_r=8), fixed) else []
    if fixed.get("nf4") is False and fits(w, {k: v for k, v in fixed.items() if k != "nf4"}):
        found.append("--quantize nf4")
    recomputed = fixed.get("recompute_layers", w.model.num_hidden_layers) >= w.model.num_hidden_layers
    streamed = {"nf4": True} | fixed | {"stream_layers": True}
    if not (w.full or fixed.get("stream_layers")) and recomputed and fits(w, streamed):
        found.append("--stream-layers")
    kept = ("nf4", "stream_layers")
    loose = {k: v for k, v in fixed.items() if k in kept}
    if loose != fixed and fits(w, loose):
        free = {"offload": "auto"}  # what leaves a setting to the plan
        found.append(" ".join(f"{flag(k)} {free.get(k, 'none')}" for k in fixed if k not in kept))
    for tokens in (t for t in (8192, 4096, 2048, 1024, 512, 256) if t < w.row_tokens):
        if fits(replace(w, row_tokens=tokens, reads=min(w.reads, tokens)), fixed):
            found.append(f"--max-length {tokens}")
            break
    for name, model in models:
        if model.hidden_size < w.model.hidden_size and fits(replace(w, model=model, packed=None), fixed):
            found.append(f"--model {name}")
            break
    needed = least / (1 - SLACK)
    found.append(f"--vram-budget {-(-int(needed) // MIB)}MiB")
    return found[:3]
