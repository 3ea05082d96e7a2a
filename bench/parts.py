"""Divides the time of a profiled step into parts, such as attention and the optimizer.

`ranges` marks calls of r3lite's functions with profiler ranges, each named after the part that the function belongs to.
`seconds_by_part` adds up the time of the operators of each part. An operator belongs to the innermost range that it ran
in. In the backward pass, autograd runs most operators outside all ranges: such an operator belongs to the part of the
forward operator whose gradient it computes.
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

# The parts.
FROZEN = "frozen weights"
ADAPTERS = "LoRA adapters"
ATTENTION = "attention"
ELEMENTWISE = "norms, SwiGLU, rotary, sums"
HEAD = "head, softmax and loss"
SAMPLING = "sampling"
COPIES = "casts and copies"
OPTIMIZER = "optimizer"
OTHER = "other operators"
OVERHEAD = "Python and overhead"

# What is done in the time of each part. bench.profile writes the percentage before it, as in "20 % draws tokens".
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
    OVERHEAD: "passes between operators, in Python and in starting them",
}

# The largest number of adapters whose matrices A are multiplied by x as one matrix.
MOST_STACKED = max(map(len, STACKS))
MICROSECONDS_PER_SECOND = 1e6
FORWARD_SCOPE = 0  # `scope` of the profiler's events outside the backward pass

# The functions whose calls are marked: the module or class that has them, their names, and the part they belong to.
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
    (Engine, ("_decode",), HEAD),  # without the model and the sampler, whose ranges lie inside
    (causal_lm.CausalLM, ("forward",), OTHER),
    (Sampler, ("__call__",), SAMPLING),
    (torch.nn.utils, ("clip_grad_norm_",), OPTIMIZER),
]


@contextlib.contextmanager
def ranges() -> Iterator[None]:
    """Within the block, each call of a function of RANGES is a range of the profiler, named after its part."""
    with contextlib.ExitStack() as stack:
        for owner, names, part in RANGES:
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, _with_range(vars(owner)[name], part)))
        yield


def _with_range(function: Callable | staticmethod, part: str) -> Callable | staticmethod:
    """Returns the function, with each call in a profiler range that is named after the part."""
    if isinstance(function, staticmethod):
        return staticmethod(_with_range(function.__func__, part))

    @functools.wraps(function)
    def marked(*args, **kwargs):
        with record_function(part):
            return function(*args, **kwargs)

    return marked


def seconds_by_part(events: Iterable[Any], self_microseconds: Callable[[Any], float], rank: int) -> dict[str, float]:
    """Returns the seconds of each part, from the profiler's events.

    `self_microseconds` returns an event's time without the time of the operators that it calls. `rank` is the rank of
    the adapters, by which products with adapters are told from products with frozen weights in the same range.
    """
    part_of: dict[int, str] = {}  # id() of an event -> its part
    # (thread, sequence number) of a forward operator -> its part. The events of its gradient name the same pair.
    forward_parts: dict[tuple[int, int], str] = {}
    totals = dict.fromkeys(MEANINGS, 0.0)
    for event in sorted(events, key=_callers_first):
        part = _part_of_event(event, part_of, forward_parts)
        part_of[id(event)] = part
        if event.name.startswith(("aten::", "mkldnn::")):
            if event.scope == FORWARD_SCOPE:
                # Several operators may have one sequence number. The last of them created the node of the gradient.
                forward_parts[event.thread, event.sequence_nr] = part
            totals[_part_of_operator(event, part, rank)] += self_microseconds(event) / MICROSECONDS_PER_SECOND
    return totals


def _callers_first(event: Any) -> tuple[float, float]:
    """Returns a sort key: by start, and of events with the same start the longest one, the caller, comes first."""
    return event.time_range.start, -event.time_range.end


def _part_of_event(event: Any, part_of: dict[int, str], forward_parts: dict[tuple[int, int], str]) -> str:
    """Returns the part of the innermost range around an event; in the backward pass, that of the forward operator."""
    parent_part = OTHER if event.cpu_parent is None else part_of[id(event.cpu_parent)]
    if event.name in MEANINGS:
        return event.name
    if event.name.startswith("Optimizer."):  # a range that PyTorch itself marks
        return OPTIMIZER
    if event.name.startswith("autograd::engine::evaluate_function"):
        if "AccumulateGrad" in event.name:  # only the adapters' gradients are accumulated
            return ADAPTERS
        return forward_parts.get((event.fwd_thread, event.sequence_nr), parent_part)
    return parent_part


def _part_of_operator(event: Any, part: str, rank: int) -> str:
    """Returns the part that an operator's time is added to. `part` is the part of its range.

    Copies are a part of their own, whatever their range. A product in the range of the adapters counts as one with
    frozen weights if all its dimensions are larger than the ranks of MOST_STACKED adapters together.
    """
    if event.name == "aten::copy_":
        return COPIES
    if part == ADAPTERS and event.name in ("aten::mm", "aten::addmm"):
        sizes = [size for shape in event.input_shapes for size in shape if len(shape) == 2]
        return FROZEN if min(sizes) > MOST_STACKED * rank else ADAPTERS
    return part
