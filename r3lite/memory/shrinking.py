"""If a device runs out of memory in spite of the plan, repeats the work in smaller pieces."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

import torch

from r3lite.core.errors import NotFinite, R3LiteError
from r3lite.core.grant import Grant, Memory, P, Phase, T
from r3lite.core.records import Record, Source
from r3lite.devices.heap import trim_heap
from r3lite.devices.random_state import random_state, set_random_state
from r3lite.devices.ranks import ALONE, Ranks
from r3lite.memory.plan import Plan
from r3lite.memory.planner import peak, standing

SMALLEST_CHUNK = 16  # tokens of a chunk of logits
SMALLEST_TILE = 32  # tokens of a tile of the MLP


class OutOfMemory(R3LiteError):
    """The device ran out of memory, and no figure can be made smaller."""


class ShrinkingGrant(Grant):
    """A grant that changes its figures to need less memory when the device runs out of it.

    Figures that the user gave (`plan.fixed`) never change. The figures are part of checkpoints. `optimizer` has the
    parameters to whose gradients the work adds. If one of several `ranks` runs out of memory, all ranks repeat the work
    with the same figures.
    """

    def __init__(self, plan: Plan, optimizer: torch.optim.Optimizer, ranks: Ranks = ALONE):
        super().__init__(plan.memory)
        self.plan = plan
        self.optimizer = optimizer
        self.ranks = ranks
        self.last_phase: Phase | None = None

    def run_within_memory(self, phase: Phase, work: Callable[P, T], *args: P.args) -> T:
        """Returns the result of `work(*args)`; if memory runs out, the work is repeated with smaller figures.

        Before that, the gradients are dropped and the random state is restored. Raises OutOfMemory if no figure can be
        made smaller. Every rank must call this, with work in which no rank waits for another. If one rank raises
        NotFinite, all ranks raise it.
        """
        if self.last_phase not in (None, phase):
            trim_heap()  # else pages that the other phase has freed would stand beside the tensors of this one
        self.last_phase = phase
        start = random_state()
        while True:
            result = None
            reason = ""  # why memory ran out in this rank
            failure = None
            try:
                result = work(*args)
            except torch.OutOfMemoryError as error:
                reason = str(error).partition("\n")[0] or "out of memory"
            except NotFinite as error:
                if self.ranks.size == 1:
                    raise
                failure = error
            if not self.ranks.any(bool(reason or failure)):
                return result
            outcomes = self.ranks.gather((reason, failure))
            for _, failure_of_rank in outcomes:
                if failure_of_rank:
                    raise failure_of_rank
            reason = next(reason_of_rank for reason_of_rank, _ in outcomes if reason_of_rank)
            result = None  # frees the memory of a rank that has not failed
            # This is not done in the except block, where the traceback would still hold the tensors of the failed work.
            self.optimizer.zero_grad(set_to_none=True)
            set_random_state(start)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self._shrink(phase, reason)

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Lets a `with` block try passes; after it, drops their gradients and restores the random state.

        Only figures that were changed because memory ran out stay changed. If the optimizer has made no moments yet, as
        much memory as they will take is occupied during the block.
        """
        start = random_state()
        parameter = self.optimizer.param_groups[0]["params"][0]
        missing_bytes = 0
        if not self.optimizer.state:
            missing_bytes = standing(self.plan.workload, self.memory)["optimizer"]
        moments = torch.empty(missing_bytes, dtype=torch.uint8, device=parameter.device)
        yield
        del moments
        self.optimizer.zero_grad(set_to_none=True)
        set_random_state(start)

    def state_dict(self) -> dict:
        """Returns the figures as JSON values."""
        return asdict(self.memory)

    def load_state_dict(self, state: dict) -> None:
        """Takes over the figures of a checkpoint if they fit into this run's budget, so that work is divided as it was.

        Raises R3LiteError if the checkpoint's base was in NF4 and this one is not, or the other way round.
        """
        record = Record(state, Source("the checkpoint's memory figures", "Pass another checkpoint."))
        figures = {}
        for name, default in asdict(Memory()).items():  # a checkpoint of an earlier version may lack some
            if isinstance(default, bool):
                figures[name] = record.flag(name, default)
            else:
                low = 0 if name == "recompute_layers" else 1
                figures[name] = record.whole(name, default, low)
        saved = Memory(**figures)
        if saved.nf4 != self.memory.nf4:
            quantize = "nf4" if saved.nf4 else "none"
            cause = "the checkpoint is of a run with another --quantize"
            raise R3LiteError(cause, f"Resume with --quantize {quantize}.", code="quantize-differs")
        # Whether layers are streamed is decided by this run's flags: it changes no result. But streaming needs all
        # layers recomputed.
        saved = replace(saved, stream_layers=self.memory.stream_layers)
        keeps_activations = saved.recompute_layers < self.plan.workload.model.num_hidden_layers
        fits = peak(self.plan.workload, saved) <= self.plan.budget
        if fits and not (saved.stream_layers and keeps_activations):
            self.memory = saved

    def _shrink(self, phase: Phase, reason: str) -> None:
        """Changes one figure so that less memory is needed, with a warning; raises OutOfMemory if none is left."""
        smaller = self._smaller(phase)
        if smaller is None:
            cause = f"the device ran out of memory, and no size can be reduced further ({reason})"
            remedy = "Close other programs that use the GPU and continue with --resume auto; or start a new run from it"
            remedy += " (--adapter) with --quantize nf4 or a smaller --max-length."
            raise OutOfMemory(cause, remedy, code="out-of-memory")
        old_figures = asdict(self.memory)
        changes = [
            f"{name} {old_figures[name]} -> {value}"
            for name, value in asdict(smaller).items()
            if value != old_figures[name]
        ]
        print(f"warning: out of memory; the step is repeated with {', '.join(changes)}", file=sys.stderr)
        self.memory = smaller

    def _smaller(self, phase: Phase) -> Memory | None:
        """Returns figures that need less memory, the cheapest change first; None if there are none."""
        m = self.memory
        w = self.plan.workload
        changes: list[tuple[str, object]] = []  # a figure and its new value, the cheapest change first
        episodes_at_once = min(m.rollout_batch_size, w.episodes)
        if phase == "sample" and episodes_at_once > 1:
            changes.append(("rollout_batch_size", episodes_at_once // 2))
        if m.micro_batch_tokens > w.pass_tokens:
            changes.append(("micro_batch_tokens", max(w.pass_tokens, m.micro_batch_tokens // 2)))
        if phase == "update":
            layers = w.model.num_hidden_layers
            if m.recompute_layers < layers:
                changes.append(("recompute_layers", (m.recompute_layers + layers + 1) // 2))
            if m.loss_chunk > SMALLEST_CHUNK:
                changes.append(("loss_chunk", m.loss_chunk // 2))
        if m.mlp_tile > SMALLEST_TILE:
            changes.append(("mlp_tile", m.mlp_tile // 2))
        if w.on_cuda and not m.offload and phase == "update":
            changes.append(("offload", True))
        for name, value in changes:
            if name not in self.plan.fixed:
                return replace(m, **{name: value})
        return None


def memory_plan_of(grant: Grant) -> Plan:
    """Returns the memory plan of a run that trains; its grant has one, and no other grant has."""
    assert isinstance(grant, ShrinkingGrant), "only the grant of a run that trains has a plan"
    return grant.plan
