"""What the time of a step is spent on: ranges around the functions of r3lite, and operators grouped by range.

Each operator belongs to the innermost range that it ran in; in the backward pass, where autograd runs it and not a
function of r3lite, to the range of the operator whose gradient it makes.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.profiler import record_function

from r3lite.models import causal_lm, functions, logprobs, projections
from r3lite.models.kv_cache import Decode, KVCache, Prefill
from r3lite.models.packing import Pack
from r3lite.models.stacks import STACKS
from r3lite.models.verification import Verification
from r3lite.rollout.engine import Engine
from r3lite.rollout.sampling import Sampler

FROZEN, ADAPTERS, ATTENTION = "frozen weights", "LoRA adapters", "attention"
ELEMENTWISE, HEAD, SAMPLING = "norms, SwiGLU, rotary, sums", "head, softmax and loss", "sampling"
COPIES, OPTIMIZER, OTHER, REST = "casts and copies", "optimizer", "other operators", "Python and overhead"

MEANINGS = {
    FROZEN: "multiplies by the model's frozen weights, which every trainer must do",
    ADAPTERS: "goes into the LoRA adapters",
    ATTENTION: "is attention, with its cache",
    ELEMENTWISE: "goes through activations number by number (norms, SwiGLU, rotary angles, residual sums)",
    HEAD: "turns hidden states into probabilities of 150,000 tokens, and into a loss where there is one",
    SAMPLING: "draws tokens",
    COPIES: "only moves numbers: changes of number format or of layout",
    OPTIMIZER: "clips gradients and updates the adapters",
    OTHER: "is embedding, masks and indexing",
    REST: "passes between operators, in Python and in starting them",
}

MOST = max(map(len, STACKS))  # adapters whose A lie side by side
# Where a range begins: an owner, the names of its functions, and the part that they belong to.
RANGES = [
    (projections, ("_frozen", "_weight"), FROZEN),
    (projections, ("_without_gradients", "_add_adapters"), ADAPTERS),
    (projections._Projected, ("forward", "backward"), ADAPTERS),
    (causal_lm.Attention, ("forward",), ATTENTION),
    (KVCache, ("reserve", "copy", "swap"), ATTENTION),
    (Prefill, ("__init__",), ATTENTION),
    (Decode, ("__init__",), ATTENTION),
    (Verification, ("__init__", "_mask"), ATTENTION),
    (Pack, ("of",), ATTENTION),
    (causal_lm.RMSNorm, ("forward",), ELEMENTWISE),
    (causal_lm, ("rotate_", "rotary_angles"), ELEMENTWISE),
    (functions, ("_gated",), ELEMENTWISE),
    (causal_lm.Layer, ("first_half", "second_half"), ELEMENTWISE),
    (functions._RMSNorm, ("backward",), ELEMENTWISE),
    (functions._Gated, ("backward",), ELEMENTWISE),
    (functions._Rotated, ("backward",), ELEMENTWISE),
    (logprobs._Loss, ("forward", "backward"), HEAD),
    (logprobs, ("_logits", "_statistics"), HEAD),
    (Engine, ("_decode",), HEAD),  # what is left of it after the model and the sampler
    (causal_lm.CausalLM, ("forward",), OTHER),
    (Sampler, ("__call__",), SAMPLING),
    (torch.nn.utils, ("clip_grad_norm_",), OPTIMIZER),
]


@contextlib.contextmanager
def ranges() -> Iterator[None]:
    """Within the block, the functions of RANGES mark their time for the profiler."""
    with contextlib.ExitStack() as stack:
        for owner, names, part in RANGES:
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, _marked(vars(owner)[name], part)))
        yield


def _marked(function: Callable | staticmethod, part: str) -> Callable | staticmethod:
    if isinstance(function, staticmethod):
        return staticmethod(_marked(function.__func__, part))

    @functools.wraps(function)
    def marked(*args, **kwargs):
        with record_function(part):
            return function(*args, **kwargs)

    return marked


def seconds_by_part(events: Iterable[Any], own_microseconds: Callable[[Any], float], rank: int) -> dict[str, float]:
    """Seconds of each part, of the profiler's events.

    `own_microseconds` is an event's own time, without that of the operators that it calls; `rank` that of the
    adapters, by which their products are told from those of the base in the same function.
    """
    part_of: dict[int, str] = {}  # by the event's identity
    makers: dict[tuple[int, int], str] = {}  # by thread and sequence number of the operator that autograd will answer
    totals = dict.fromkeys(MEANINGS, 0.0)
    for event in sorted(events, key=lambda e: (e.time_range.start, -e.time_range.end)):  # callers come first
        part = _range_of(event, part_of, makers)
        part_of[id(event)] = part
        if event.name.startswith(("aten::", "mkldnn::")):
            if event.scope == FORWARD:
                makers[event.thread, event.sequence_nr] = part  # the last one of a number is the one that made it
            totals[_kind(event, part, rank)] += own_microseconds(event) / 1e6
    return totals


FORWARD = 0  # an event's scope, where autograd did not run it


def _range_of(event: Any, part_of: dict[int, str], makers: dict[tuple[int, int], str]) -> str:
    """The part that an event belongs to by where it ran."""
    around = OTHER if event.cpu_parent is None else part_of[id(event.cpu_parent)]
    if event.name in MEANINGS:
        return event.name
    if event.name.startswith("Optimizer."):  # PyTorch's own range
        return OPTIMIZER
    if event.name.startswith("autograd::engine::evaluate_function"):
        if "AccumulateGrad" in event.name:  # only adapters have gradients that are kept
            return ADAPTERS
        return makers.get((event.fwd_thread, event.sequence_nr), around)
    return around


def _kind(event: Any, part: str, rank: int) -> str:
    """The part that an operator counts for: its range's, but for copies, and for products with frozen weights."""
    if event.name == "aten::copy_":
        return COPIES
    if part == ADAPTERS and event.name in ("aten::mm", "aten::addmm"):
        sizes = [size for shape in event.input_shapes for size in shape if len(shape) == 2]
        return FROZEN if min(sizes) > MOST * rank else ADAPTERS
    return part
