"""Samples episodes: each iteration schedules, runs the model and looks at the turns; documents are fetched meanwhile.

Asks a layout how an episode opens and goes on, and knows no step format; is handed a function that retrieves, and
imports no retriever. The weights are those of the model it is given, with whatever adapter is switched on.
"""

import math
import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor, nn
from tqdm import tqdm

from r3lite.core import bars
from r3lite.core.episode import Document, Question, Retrieve
from r3lite.core.errors import NotFinite
from r3lite.core.grant import Grant
from r3lite.core.spans import Spans
from r3lite.models.causal_lm import CausalLM
from r3lite.models.hooks import explain_overflow
from r3lite.models.kv_cache import KVCache, Prefill
from r3lite.models.linear import linear
from r3lite.models.lora import cast_once
from r3lite.protocols.transcript import Layout
from r3lite.rollout.decoder import Decoder, GraphDecoder
from r3lite.rollout.fetcher import Fetcher
from r3lite.rollout.scheduler import Scheduler, passes
from r3lite.rollout.sequence import Listener, Sequence


@dataclass
class Engine:
    """Rollout engine of one model. `value_head`, if there is one, gives the value of the state before each token.

    How many episodes run at a time and how many tokens a prefill takes are read from `grant` each time anew.
    """

    model: CausalLM
    layout: Layout
    sampler: Callable[[Tensor, list[float]], tuple[Tensor, Tensor]]
    grant: Grant
    value_head: nn.Module | None = None
    autocast: Callable[[], AbstractContextManager] = nullcontext
    spans: Spans | None = None
    layouts: Mapping[str, Layout] = field(default_factory=dict)  # of sources whose questions are laid out otherwise

    def layout_of(self, sequence: Sequence) -> Layout:
        """The layout of the source that a sequence's question is from."""
        return self.layouts.get(sequence.question.source, self.layout)

    def run(
        self,
        questions: list[Question],
        seeds: list[str],
        retrieve: Retrieve,
        progress: str | None = None,
        listeners: list[Listener] | None = None,
    ) -> list[Sequence]:
        """One episode per question, each drawing from the random stream of its own seed.

        Questions may repeat (with different seeds). `progress` names a progress bar. `listeners`, one per question,
        are told of the episodes while they are sampled.
        """
        drawn = enumerate(zip(questions, seeds, strict=True))
        sequences = [Sequence(q, stream=random.Random(seed), place=place) for place, (q, seed) in drawn]
        for sequence, listener in zip(sequences, listeners or [None] * len(sequences), strict=True):
            sequence.listener = listener
            self.layout_of(sequence).open(sequence)
        return self.finish(sequences, retrieve, progress, bool(listeners))

    def run_on(self, begun: list[tuple[Sequence, int]], seeds: list[str], retrieve: Retrieve) -> list[Sequence]:
        """Another end for each of some finished sequences, from where it stood after so many of its steps.

        Tokens, log-probabilities and values up to there are kept; each draws the rest from the stream of its own seed.
        """
        pairs = zip(begun, seeds, strict=True)
        sequences = [sequence.restarted(steps, random.Random(seed)) for (sequence, steps), seed in pairs]
        return self.finish(sequences, retrieve)

    @torch.no_grad()
    def finish(
        self, sequences: list[Sequence], retrieve: Retrieve, progress: str | None = None, heard: bool = False
    ) -> list[Sequence]:
        """The same sequences, which were opened, at their ends. What is `heard` while it is sampled needs no bar."""
        if not sequences:  # of more ranks than episodes, some have none
            return []
        training = self.model.training
        self.model.eval()  # no dropout: the policy that samples is the policy that is trained
        look = bars.named(progress, "answering") | ({"disable": True} if heard else {})
        bar = tqdm(total=len(sequences), unit="episode", **look)
        try:
            with self.autocast(), closing(Fetcher(retrieve, self.spans)) as fetcher, bar:
                if pending := [s for s in sequences if s.pending]:  # a baseline's
                    for sequence, documents in fetcher.fetch(pending):
                        self._splice(sequence, documents)
                opened = [s for s in sequences if s.finish is None]
                scheduler, decoder = self.begin(opened, min(self.grant.memory.rollout_batch_size, len(opened)))
                with cast_once(self.model, self.model.head_weight.dtype):
                    while scheduler.todo or scheduler.rows:
                        self.iterate(scheduler, decoder, fetcher, bar.update)
        finally:
            self.model.train(training)
        return sequences

    def begin(self, sequences: list[Sequence], rows: int) -> tuple[Scheduler, Decoder]:
        """The scheduler and the decoder that run sequences in a new cache of `rows` rows."""
        cache = KVCache.of(self.model, rows)
        if cache.device.type == "cuda" and not self.model.stream:  # a graph holds no copies from the host
            decoder = GraphDecoder(self.model, cache, self.layout.lengths.max_length)
        else:
            decoder = Decoder(self.model, cache)
        return Scheduler(list(sequences), cache), decoder

    def iterate(self, scheduler: Scheduler, decoder: Decoder, fetcher: Fetcher, over: Callable[[], object]) -> None:
        """One token more for each row at work, and what follows from it."""
        scheduler.admit()
        for sequence, documents in fetcher.collect(idle=not scheduler.active):
            self._splice(sequence, documents)
            scheduler.unpark(sequence)
            if sequence.finish is not None:  # there was no room for documents, nor for an answer
                scheduler.release(sequence)
                over()
        if self.spans:
            for sequence in scheduler.at_work:
                sequence.begin_turn(self.spans)
        self._prefill(scheduler)
        self._decode(scheduler, decoder)
        for sequence in scheduler.at_work:
            layout = self.layout_of(sequence)
            ended = layout.turn_is_over(sequence)
            if sequence.listener:
                sequence.listener.hear(layout.readable(sequence, ended), ended)
            if not ended:
                continue
            if self.spans:
                sequence.record_turn(self.spans)
            layout.close_turn(sequence)
            if sequence.listener and not (sequence.pending or sequence.held):
                sequence.listener.step(sequence)
            if sequence.finish is not None:
                scheduler.release(sequence)
                over()
            elif sequence.pending:
                fetcher.ask(sequence)
                scheduler.park(sequence)
        fetcher.send(idle=not scheduler.active)

    def _splice(self, sequence: Sequence, documents: list[list[Document]]) -> None:
        """Gives a sequence the documents of its pending queries, which completes its last step."""
        self.layout_of(sequence).splice(sequence, documents)
        if sequence.listener:
            sequence.listener.step(sequence)

    def _prefill(self, scheduler: Scheduler) -> None:
        """Runs the given tokens of the rows at work, except the last one of each, which `_decode` runs."""
        pending = [s.tokens[s.cached : -1] for s in scheduler.at_work]
        for given in passes(pending, self.grant.memory.micro_batch_tokens):
            prefill = Prefill(scheduler.cache, given)
            self.model(prefill.tokens, prefill)
            for row, tokens in given:
                scheduler.rows[row].cached += len(tokens)

    def _decode(self, scheduler: Scheduler, decoder: Decoder) -> None:
        """Runs the last token of each row at work and samples the next one."""
        rows = scheduler.at_work
        if not rows:
            return
        hidden = decoder([s.tokens[-1] for s in rows])  # [B, C]
        logits = linear(hidden, self.model.head_weight)  # [B, V]
        logits[:, self.layout.tokenizer.size :] = -math.inf  # padding rows of the embedding are never sampled
        drawn = [*self._sample(logits, rows)]
        if self.value_head is not None:
            drawn.append(self.value_head(hidden))
        # All numbers of a step come in one transfer, because each waits for the device; ids are exact in fp32.
        tokens, logprobs, *values = torch.stack([x.to(drawn[1]) for x in drawn]).tolist()
        for sequence, logprob in zip(rows, logprobs):
            if math.isnan(logprob):
                self._explain_overflow(sequence)
        for i, sequence in enumerate(rows):
            sequence.cached += 1
            sequence.write([int(tokens[i])])
            sequence.logprobs.append(logprobs[i])
            sequence.values.append(values[0][i] if values else 0.0)

    def _explain_overflow(self, sequence: Sequence) -> NoReturn:
        tokens = torch.tensor([sequence.tokens], device=self.model.head_weight.device)
        told = explain_overflow(self.model, lambda: self.model(tokens))
        remedy = "Pass --dtype bf16 or --dtype fp32, which have a larger range, or start from another --adapter."
        raise NotFinite(f"question {sequence.question.id}: the model's logits are not finite: {told}", remedy)

    def _sample(self, logits: Tensor, rows: list[Sequence]) -> tuple[Tensor, Tensor]:
        """Tokens [B] and their log-probabilities [B], from logits [B, V]; each row draws from its own stream."""
        return self.sampler(logits, [s.stream.random() for s in rows])
