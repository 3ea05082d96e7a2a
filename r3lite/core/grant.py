"""The memory that a run is granted: how its work is divided so that it fits, in one object that all rooms read.

The room `memory/` plans these figures, and makes them smaller when a device runs out in spite of the plan.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Phase = Literal["sample", "update"]


@dataclass(frozen=True)
class Memory:
    """The figures that decide how much memory a run takes and how fast it is; only `nf4` changes what it computes."""

    nf4: bool = False
    recompute_layers: int = 0
    micro_batch_tokens: int = 4096  # of one pass; a longer row forms its own
    loss_chunk: int = 128  # rows of logits that exist at a time
    mlp_tile: int = 1024  # tokens for which the inside of an MLP exists at a time, if it is not kept
    offload: bool = False
    rollout_batch_size: int = 64
    stream_layers: bool = False  # two layers are on the device, the others on the host; see models/streaming.py


class Grant:
    """The memory figures that a run works with now. Code that divides work reads them here each time."""

    def __init__(self, memory: Memory):
        self.memory = memory

    def attempt(self, phase: Phase, work: Callable[P, T], *args: P.args) -> T:
        """The result of `work(*args)`, which samples or adds gradients.

        Here it is tried once. `memory.shrinking.ShrinkingGrant` tries again in smaller pieces if memory runs out.
        """
        return work(*args)
