"""What happens when a device runs out of memory in spite of the plan: the same work again, in smaller pieces."""

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import ParamSpec, TypeVar

import torch

from r3lite import grant
from r3lite.errors import R3LiteError
from r3lite.grant import Memory, Phase
from r3lite.memory.planner import peak
from r3lite.memory.workloads import Plan
from r3lite.training import checkpoint
from r3lite.training.loop import Training

P = ParamSpec("P")
T = TypeVar("T")
LEAST_CHUNK, LEAST_TILE = 16, 32
NAME = "memory"  # in what a checkpoint keeps


class OutOfMemory(R3LiteError):
    """Nothing is left that could be made smaller."""


class Grant(grant.Grant):
    """The memory settings that a run works with. They shrink when the device runs out, and are part of checkpoints.

    `fixed` holds those that the user gave, which stay; `apply` puts changed ones into effect.
    """

    def __init__(self, plan: Plan, fixed: dict, apply: Callable[[Memory], None], training: Training):
        super().__init__(plan.memory)
        self.plan, self.fixed, self.apply, self.training = plan, fixed, apply, training
        training.kept[NAME] = dataclasses.asdict(self.memory)
        apply(self.memory)

    def resume(self) -> None:
        """At a step's start: the settings of the checkpoint that was resumed, so that work is divided as it was.

        Not where the run was given less memory this time than they take.
        """
        saved = Memory(**self.training.kept[NAME])
        if saved.nf4 != self.memory.nf4:
            was = "nf4" if saved.nf4 else "none"
            raise R3LiteError("the checkpoint is of a run with another base", f"Resume with --quantize {was}.")
        if saved != self.memory and peak(self.plan.workload, saved) <= self.plan.budget:
            self.memory = saved
            self.apply(saved)

    def attempt(self, phase: Phase, work: Callable[P, T], *args: P.args) -> T:
        """The result of `work(*args)`, which samples or adds gradients; it is repeated in smaller pieces if memory runs
        out.

        Half-made gradients are dropped, and dropout is rewound. Raises OutOfMemory when nothing can be made smaller.
        """
        random_state = checkpoint.random_state()
        while True:
            try:
                return work(*args)
            except torch.OutOfMemoryError as error:
                reason = str(error).splitlines()[0]
            # Outside the except block, whose traceback holds the tensors of the work that failed.
            self.training.optimizer.zero_grad(set_to_none=True)
            checkpoint.set_random_state(random_state)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            less = self._smaller(phase == "sample")
            if less is None:
                raise OutOfMemory(
                    f"the device ran out of memory, and nothing is left to make smaller ({reason})",
                    "Close what else uses the card and go on with --resume auto; or start anew, with this run as "
                    "--adapter, and --quantize nf4 or a smaller --max-length.",
                )
            old, new = dataclasses.asdict(self.memory), dataclasses.asdict(less)
            told = ", ".join(f"{name} {old[name]} -> {new[name]}" for name in new if new[name] != old[name])
            print(f"warning: out of memory; the step is repeated with {told}", file=sys.stderr)
            self.memory, self.training.kept[NAME] = less, new
            self.apply(less)

    def _smaller(self, sampling: bool) -> Memory | None:
        """The next smaller settings, the cheapest change first; what the user fixed stays."""
        m, w = self.memory, self.plan.workload
        steps: list[tuple[str, object]] = []
        if sampling:
            steps.append(("rollout_batch_size", min(m.rollout_batch_size, w.episodes) // 2))
        if m.micro_batch_tokens > w.row_tokens:
            steps.append(("micro_batch_tokens", max(w.row_tokens, m.micro_batch_tokens // 2)))
        if not sampling:
            L = w.model.num_hidden_layers
            if m.recompute_layers < L:
                steps.append(("recompute_layers", (m.recompute_layers + L + 1) // 2))
            if m.loss_chunk > LEAST_CHUNK:
                steps.append(("loss_chunk", m.loss_chunk // 2))
        if m.mlp_tile > LEAST_TILE:
            steps.append(("mlp_tile", m.mlp_tile // 2))
        if w.on_cuda and not m.offload and not sampling:
            steps.append(("offload", True))
        for name, value in steps:
            if name not in self.fixed and value:
                return replace(m, **{name: value})
        return None
