"""Sequences that join and leave while others are sampled, with several adapters of one model.

Each adapter has a lane: rows of its own in a cache of its own, so that its tokens have never been batched with
another's. An iteration samples one token of every row of every lane that has work. So no adapter waits for another, no
weights are loaded, and within a lane it is first come, first served. Knows no requests and no clock.
"""

import math
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from r3lite.core.episode import CUT_OFF, Retrieve
from r3lite.core.errors import NotFinite
from r3lite.models.lora import cast_once, use_adapter
from r3lite.rollout.engine import Engine
from r3lite.rollout.fetcher import Fetcher
from r3lite.rollout.sampling import Sampler
from r3lite.rollout.sampling_batches import SamplingBatch
from r3lite.rollout.scheduler import Scheduler
from r3lite.rollout.sequence import Sequence


@dataclass
class Visitor(Sequence):
    """A sequence that joins others: with a sampler and a limit of its own, and free to leave.

    `error` is why it could not go on; other sequences are not concerned.
    """

    adapter: str | None = None  # None: the bare base
    sampler: Sampler = Sampler()
    max_tokens: int | None = None  # that it may write in all
    leaving: bool = False
    error: NotFinite | None = None

    @property
    def tokens_left(self) -> float:
        """How many tokens it may write yet, beside the limits of its layout."""
        if self.max_tokens is None:
            return math.inf
        return self.max_tokens - len(self.logprobs)

    @property
    def must_leave(self) -> bool:
        """True if it leaves, cannot go on, or has written all that it may."""
        return self.leaving or self.error is not None or self.tokens_left <= 0


class LaneEngine(Engine):
    """An engine whose rows each have a sampler of their own."""

    def _sample(self, logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
        samplers = [visitor.sampler for visitor in batch.sequences]
        if len(set(samplers)) == 1:
            return samplers[0](logits, batch.uniforms)
        uniforms = batch.uniforms
        tokens = torch.empty(len(samplers), dtype=torch.long, device=logits.device)  # [B]
        logprobs: Tensor | None = None  # [B]
        for sampler in dict.fromkeys(samplers):
            own = [i for i, other in enumerate(samplers) if other == sampler]
            indices = torch.tensor(own).to(logits.device, non_blocking=True)
            tokens[indices], sampler_logprobs = sampler(logits[indices], [uniforms[i] for i in own])
            if logprobs is None:
                logprobs = sampler_logprobs.new_empty(len(samplers))
            logprobs[indices] = sampler_logprobs
        return tokens, logprobs

    def _fail(self, sequence: Visitor, error: NotFinite) -> None:
        """Ends this sequence only."""
        sequence.error = error


class Lanes:
    """The lanes of some adapters, each with `rows` rows. Used by one thread; `close` ends it."""

    def __init__(
        self,
        engine: LaneEngine,
        adapters: list[str | None],
        rows: int,
        retrieve: Retrieve,
    ):
        engine.model.eval()
        self.engine = engine
        self.visitors: list[Visitor] = []  # waiting and sampled
        self.cast_weights = ExitStack()
        self.cast_weights.enter_context(cast_once(engine.model, engine.model.head_weight.dtype))
        self.lanes = {name: engine.build_scheduler_and_decoder([], rows) for name in adapters}
        self.fetchers = {name: Fetcher(retrieve) for name in adapters}

    def join(self, sequence: Visitor) -> None:
        """Takes an opened sequence, which gets a row when one is free."""
        self.visitors.append(sequence)
        if sequence.finish is None:  # its prompt left space for an answer
            scheduler, _ = self.lanes[sequence.adapter]
            scheduler.waiting.append(sequence)

    @torch.no_grad()
    def iterate(self) -> list[Visitor]:
        """Samples one more token of each row at work; returns the sequences that ended, or left, in this iteration.

        A sequence that waits for documents leaves only when these have come.
        """
        for scheduler, _ in self.lanes.values():
            self._clear_out(scheduler)
        busy = []
        for name, (scheduler, _) in self.lanes.items():
            if scheduler.waiting or scheduler.rows:
                busy.append(name)
        computing = [name for name in busy if not self._only_waits(name)]
        for name in computing or busy:
            scheduler, decoder = self.lanes[name]
            with use_adapter(self.engine.model, name), self.engine.autocast():
                fetcher = self.fetchers[name]
                self.engine.iterate(scheduler, decoder, fetcher, on_finish=lambda: None)
            self._clear_out(scheduler)
        finished = [visitor for visitor in self.visitors if visitor.finish is not None]
        self.visitors = [visitor for visitor in self.visitors if visitor.finish is None]
        return finished

    def _only_waits(self, name: str | None) -> bool:
        """Returns whether an iteration of a lane would only wait for documents, which would hold up the other lanes."""
        scheduler, _ = self.lanes[name]
        if scheduler.active or scheduler.waiting:
            return False
        return self.fetchers[name].is_waiting

    def _clear_out(self, scheduler: Scheduler) -> None:
        """Cuts off the sequences of a lane that must leave, unless they wait for documents."""
        for sequence in [s for s in scheduler.waiting if s.must_leave]:
            scheduler.waiting.remove(sequence)
            sequence.finish = CUT_OFF
        for sequence in [s for s in scheduler.running if s.must_leave]:
            if sequence.error:
                scheduler.discard(sequence)
            else:
                scheduler.release(sequence)
            sequence.finish = CUT_OFF

    def close(self) -> None:
        """Waits for the queries that are under way, and drops everything."""
        for fetcher in self.fetchers.values():
            fetcher.close()
        self.cast_weights.close()
