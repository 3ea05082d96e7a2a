"""What happens when a device runs out of memory in spite of the plan: the same work again, in smaller pieces."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

import torch

from r3lite.core.errors import NotFinite, R3LiteError
from r3lite.core.grant import Grant, Memory, P, Phase, T
from r3lite.core.records import Record, Source
from r3lite.devices.random_state import random_state, set_random_state
from r3lite.devices.ranks import ALONE, Ranks
from r3lite.memory.plan import Plan
from r3lite.memory.planner import peak, standing

LEAST_CHUNK, LEAST_TILE = 16, 32


class OutOfMemory(R3LiteError):
    """Nothing is left that could be made smaller."""


class ShrinkingGrant(Grant):
    """A grant whose figures become smaller when the device runs out of memory. They are part of checkpoints.

    Figures that the user gave (`plan.fixed`) stay. `optimizer` is that of the parameters whose gradients are added. If
    one of several `ranks` runs out, all repeat the work with the same figures.
    """

    def __init__(self, plan: Plan, optimizer: torch.optim.Optimizer, ranks: Ranks = ALONE):
        super().__init__(plan.memory)
        self.plan, self.optimizer, self.ranks = plan, optimizer, ranks

    def attempt(self, phase: Phase, work: Callable[P, T], *args: P.args) -> T:
        """The result of `work(*args)`; if memory runs out, of the same again with smaller figures.

        Gradients of a failed attempt are dropped, and dropout is rewound. Raises OutOfMemory if nothing can be made
        smaller. Every rank calls this, with work in which none waits for another. NotFinite is raised on all of them.
        """
        before = random_state()
        while True:
            result, reason, failure = None, "", None
            try:
                result = work(*args)
            except torch.OutOfMemoryError as error:
                reason = str(error).splitlines()[0]
            except NotFinite as error:
                if self.ranks.size == 1:
                    raise
                failure = error
            if not self.ranks.any(bool(reason or failure)):
                return result
            said = self.ranks.gather((reason, failure))
            if failure := next((failure for _, failure in said if failure), None):
                raise failure
            reason, result = next(reason for reason, _ in said if reason), None
            # Outside the except block, whose traceback holds the tensors of the work that failed.
            self.optimizer.zero_grad(set_to_none=True)
            set_random_state(before)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self._shrink(phase, reason)

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Within the `with` block updates are tried whose gradients are dropped; only figures that became smaller stay.

        The moments that the optimizer makes in its first step have their room taken until then.
        """
        before, parameter = random_state(), self.optimizer.param_groups[0]["params"][0]
        missing = 0 if self.optimizer.state else standing(self.plan.workload, self.memory)["optimizer"]
        moments = torch.empty(missing, dtype=torch.uint8, device=parameter.device)
        yield
        del moments
        self.optimizer.zero_grad(set_to_none=True)
        set_random_state(before)

    def state_dict(self) -> dict:
        """The figures, as JSON."""
        return asdict(self.memory)

    def load_state_dict(self, state: dict) -> None:
        """Takes over the figures of a checkpoint, so that work is divided as it was, if they fit into today's budget.

        Raises R3LiteError if the checkpoint's base was in NF4 and this one is not, or the other way round.
        """
        record = Record(state, Source("the checkpoint's memory figures", "Pass another checkpoint."))
        figures = {}
        for name, default in asdict(Memory()).items():  # a checkpoint of an earlier version may lack some
            low = 0 if name == "recompute_layers" else 1
            whole = not isinstance(default, bool)
            figures[name] = record.whole(name, default, low) if whole else record.flag(name, default)
        saved = Memory(**figures)
        if saved.nf4 != self.memory.nf4:
            was = "nf4" if saved.nf4 else "none"
            raise R3LiteError("the checkpoint is of a run with another --quantize", f"Resume with --quantize {was}.")
        # Streaming is this run's own choice: it changes no number, but needs all layers recomputed.
        saved = replace(saved, stream_layers=self.memory.stream_layers)
        keeps = saved.recompute_layers < self.plan.workload.model.num_hidden_layers
        if peak(self.plan.workload, saved) <= self.plan.budget and not (saved.stream_layers and keeps):
            self.memory = saved

    def _shrink(self, phase: Phase, reason: str) -> None:
        """Makes one figure smaller and says so."""
        less = self._smaller(phase)
        if less is None:
            anew = "start a new run from it (--adapter) with --quantize nf4 or a smaller --max-length"
            remedy = f"Close other programs that use the GPU and continue with --resume auto; or {anew}."
            raise OutOfMemory(f"the device ran out of memory, and no size can be reduced further ({reason})", remedy)
        old, new = asdict(self.memory), asdict(less)
        changes = ", ".join(f"{name} {old[name]} -> {new[name]}" for name in new if new[name] != old[name])
        print(f"warning: out of memory; the step is repeated with {changes}", file=sys.stderr)
        self.memory = less

    def _smaller(self, phase: Phase) -> Memory | None:
        """The next smaller figures, the cheapest change first; None if there are none."""
        m, w = self.memory, self.plan.workload
        changes: list[tuple[str, object]] = []
        if phase == "sample":
            changes.append(("rollout_batch_size", min(m.rollout_batch_size, w.episodes) // 2))
        if m.micro_batch_tokens > w.pass_tokens:
            changes.append(("micro_batch_tokens", max(w.pass_tokens, m.micro_batch_tokens // 2)))
        if phase == "update":
            L = w.model.num_hidden_layers
            if m.recompute_layers < L:
                changes.append(("recompute_layers", (m.recompute_layers + L + 1) // 2))
            if m.loss_chunk > LEAST_CHUNK:
                changes.append(("loss_chunk", m.loss_chunk // 2))
        if m.mlp_tile > LEAST_TILE:
            changes.append(("mlp_tile", m.mlp_tile // 2))
        if w.on_cuda and not m.offload and phase == "update":
            changes.append(("offload", True))
        for name, value in changes:
            if name not in self.plan.fixed and value:
                return replace(m, **{name: value})
        return None
