"""The memory figures of a run: how its work is divided so that it fits, in one object that all layers read.

`memory/` plans these figures, and makes them smaller if a device runs out of memory in spite of the plan.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Phase = Literal["sample", "update"]


@dataclass(frozen=True)
class Memory:
    """The figures that decide a run's memory and speed. Only `nf4` changes the run's results."""

    nf4: bool = False  # the base is quantized
    recompute_layers: int = 0  # layers with activation checkpointing
    micro_batch_tokens: int = 4096  # the most tokens in one pass; a longer row has a pass of its own
    loss_chunk: int = 128  # rows of logits at a time
    mlp_tile: int = 1024  # tokens at a time in an MLP whose activations are not kept
    offload: bool = False  # checkpointed activations are kept on the host
    rollout_batch_size: int = 64  # episodes that are sampled at a time
    stream_layers: bool = False  # two layers are on the device, the others on the host; see models/streaming.py


class Grant:
    """Holds the current memory figures of a run. Code that divides work reads them anew each time."""

    def __init__(self, memory: Memory):
        self.memory = memory

    def run_within_memory(self, phase: Phase, work: Callable[P, T], *args: P.args) -> T:
        """Returns the result of `work(*args)`, which samples episodes or runs the model on whole rows.

        This class runs the work once. `memory.shrinking.ShrinkingGrant` runs it again with smaller figures if memory
        runs out, so the work must change nothing that a second run would change again, except gradients.
        """
        return work(*args)

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Lets a `with` block try passes, which must change nothing.

        With this class the block runs as any other. `ShrinkingGrant` occupies what the run will need later, and drops
        the gradients of the passes.
        """
        yield
