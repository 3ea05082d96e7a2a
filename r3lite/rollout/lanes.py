"""Sequences that join and leave while others are sampled, with several adapters of one model.

Each adapter has a lane: a KV cache with rows of its own, so that tokens of different adapters are never in one batch.
An iteration samples one token of every row, or several with drafts, in every lane that has work. So no adapter waits
for another, and switching between adapters loads no weights. Within a lane, sequences are served in the order in which
they join. This file knows no requests and no clock.
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
    """A sequence that joins others, with a sampler and a limit of its own, and that may leave before its end."""

    adapter: str | None = None  # None: the base model without an adapter
    sampler: Sampler = Sampler()
    max_tokens: int | None = None  # how many tokens it may write in all; None: only the layout limits it
    leaving: bool = False  # set from outside, to cut the sequence off
    error: NotFinite | None = None  # why the sequence failed, if it did; other sequences continue

    @property
    def tokens_left(self) -> float:
        """How many more tokens the sequence may write. The layout limits every sequence in addition."""
        if self.max_tokens is None:
            return math.inf
        return self.max_tokens - len(self.logprobs)

    @property
    def must_leave(self) -> bool:
        """True if the sequence is `leaving`, has failed, or has written all tokens that it may."""
        return self.leaving or self.error is not None or self.tokens_left <= 0


class LaneEngine(Engine):
    """An engine whose sequences are Visitors, each with a sampler of its own."""

    def _sample(self, logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
        """Returns tokens [B] and their log-probabilities [B]; calls each different sampler once."""
        samplers = [visitor.sampler for visitor in batch.sequences]
        if len(set(samplers)) == 1:
            return samplers[0](logits, batch.uniforms)
        uniforms = batch.uniforms
        tokens = torch.empty(len(samplers), dtype=torch.long, device=logits.device)  # [B]
        logprobs: Tensor | None = None  # [B]
        for sampler in dict.fromkeys(samplers):
            entries = [i for i, entry_sampler in enumerate(samplers) if entry_sampler == sampler]
            entry_uniforms = [uniforms[i] for i in entries]
            indices = torch.tensor(entries).to(logits.device, non_blocking=True)
            entry_tokens, entry_logprobs = sampler(logits[indices], entry_uniforms)
            if logprobs is None:
                logprobs = entry_logprobs.new_empty(len(samplers))
            tokens[indices] = entry_tokens
            logprobs[indices] = entry_logprobs
        return tokens, logprobs

    def _fail(self, sequence: Visitor, error: NotFinite) -> None:
        """Marks the sequence as failed, so that `Lanes` cuts it off. Unlike `Engine._fail`, does not raise."""
        sequence.error = error


class Lanes:
    """The lanes of some adapters, each with `rows` rows. All methods must be called on one thread, and `close` last."""

    def __init__(
        self,
        engine: LaneEngine,
        adapters: list[str | None],
        rows: int,
        retrieve: Retrieve,
    ):
        engine.model.eval()
        self.engine = engine
        self.visitors: list[Visitor] = []  # all sequences that `iterate` has not returned yet, with and without a row
        self.cast_weights = ExitStack()
        self.cast_weights.enter_context(cast_once(engine.model, engine.model.head_weight.dtype))
        self.lanes = {name: engine.build_scheduler_and_decoder([], rows) for name in adapters}
        self.fetchers = {name: Fetcher(retrieve) for name in adapters}

    def join(self, sequence: Visitor) -> None:
        """Takes an opened sequence, which gets a row when one is free."""
        self.visitors.append(sequence)
        if sequence.finish is None:  # else its prompt left no room for an answer
            scheduler, _ = self.lanes[sequence.adapter]
            scheduler.waiting.append(sequence)

    @torch.no_grad()
    def iterate(self) -> list[Visitor]:
        """Samples one more token of each running row, or several with drafts; returns the sequences that ended or left.

        A sequence that waits for documents leaves only after they have come. A lane in which all sequences wait for
        documents is passed over, unless this holds for all lanes: then all wait for them.
        """
        for scheduler, _ in self.lanes.values():
            self._clear_out(scheduler)
        busy = []
        for name, (scheduler, _) in self.lanes.items():
            if scheduler.waiting or scheduler.rows:
                busy.append(name)
        ready = [name for name in busy if not self._only_waits(name)]
        for name in ready or busy:
            scheduler, decoder = self.lanes[name]
            with use_adapter(self.engine.model, name), self.engine.autocast():
                fetcher = self.fetchers[name]
                self.engine.iterate(scheduler, decoder, fetcher, on_finish=lambda: None)
            self._clear_out(scheduler)
        finished = [visitor for visitor in self.visitors if visitor.finish is not None]
        self.visitors = [visitor for visitor in self.visitors if visitor.finish is None]
        return finished

    def _only_waits(self, name: str | None) -> bool:
        """Returns whether an iteration of a lane would only wait for documents, and so hold up the other lanes."""
        scheduler, _ = self.lanes[name]
        if scheduler.running_count or scheduler.waiting:
            return False
        return self.fetchers[name].is_waiting

    def _clear_out(self, scheduler: Scheduler) -> None:
        """Cuts off those sequences of a lane that must leave, and frees their rows. Parked ones stay for now."""
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
        """Waits for the queries that are being answered, drops the others, and frees the cast weights."""
        for fetcher in self.fetchers.values():
            fetcher.close()
        self.cast_weights.close()
