"""The rollout engine: samples episodes by continuous batching, and fetches their documents meanwhile.

An iteration admits waiting sequences, prefills prompts and documents, samples a token of each running sequence, and
closes the turns that are over. A `Layout` decides how an episode opens and goes on; the engine knows no
step format and no retriever. It samples with the model's active adapter.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from tqdm import tqdm

from r3lite.core import bars
from r3lite.core.episode import Document, Question, Retrieve
from r3lite.core.errors import NotFinite
from r3lite.core.grant import Grant
from r3lite.core.spans import NO_SPANS, Spans
from r3lite.models.causal_lm import CausalLM
from r3lite.models.hooks import overflow_error
from r3lite.models.kv_cache import KVCache, Prefill
from r3lite.models.linear import linear
from r3lite.models.lora import cast_once
from r3lite.protocols.layout import Layout
from r3lite.rollout.decoder import Decoder, GraphDecoder
from r3lite.rollout.drafts import append_sampled, draft_limits, drafter_of
from r3lite.rollout.fetcher import Fetcher
from r3lite.rollout.prefixes import prefills
from r3lite.rollout.sampling_batches import SampledToken, SamplingBatch
from r3lite.rollout.scheduler import Scheduler
from r3lite.rollout.sequence import Listener, Sequence
from r3lite.rollout.uniforms import Uniforms
from r3lite.settings.rollout import DRAFTING_SEQUENCES


@dataclass
class Engine:
    """The rollout engine of one model."""

    model: CausalLM
    layout: Layout
    sampler: Callable[[Tensor, list[float]], tuple[Tensor, Tensor]]  # see sampling.Sampler
    grant: Grant  # limits how many episodes run at a time, and how many tokens one prefill has
    value_head: nn.Module | None = None  # hidden states [B, C] -> values [B] of the states before the next tokens
    autocast: Callable[[], AbstractContextManager] = nullcontext
    spans: Spans = NO_SPANS
    layouts: Mapping[str, Layout] = field(default_factory=dict)  # by the source of the question; others have `layout`
    draft_tokens: int = 0  # the most tokens that are drafted for a row in one pass, see drafts.py

    def begin_round(self, number: int, retrieve: Retrieve) -> None:
        """Does nothing: the engine samples with the model that is trained. See `remote.RemoteEngine`."""

    def end_round(self, number: int, retrieve: Retrieve) -> dict[str, float]:
        """Returns no metrics: all episodes of the round were sampled here. See `remote.RemoteEngine`."""
        return {}

    def close(self) -> None:
        """Does nothing: nothing is under way between two calls."""

    def layout_of(self, sequence: Sequence) -> Layout:
        """Returns the layout for the source of a sequence's question."""
        return self.layouts.get(sequence.question.source, self.layout)

    def run(
        self,
        questions: list[Question],
        seeds: list[str],
        retrieve: Retrieve,
        progress: str | None = None,
        listeners: list[Listener] | None = None,
    ) -> list[Sequence]:
        """Samples one episode per question, each from the random stream of its own seed.

        Questions may repeat, with different seeds. `progress` is the name of the progress bar. `listeners`, one per
        question, are called while the episodes are sampled.
        """
        sequences = []
        listener_of_each = listeners or [None] * len(questions)
        for index, (question, seed, listener) in enumerate(zip(questions, seeds, listener_of_each, strict=True)):
            sequence = Sequence(question, stream=Uniforms(seed), listener=listener, index=index)
            self.layout_of(sequence).open(sequence)
            sequences.append(sequence)
        return self.finish(sequences, retrieve, progress=progress, quiet=bool(listeners))

    def continue_from(
        self,
        starts: list[tuple[Sequence, int]],
        seeds: list[str],
        retrieve: Retrieve,
    ) -> list[Sequence]:
        """Samples another end for each pair (finished sequence, number of its first steps that are kept).

        Tokens, log-probabilities and values of these steps are copied. Each new end has the random stream of its own
        seed.
        """
        sequences = []
        for (sequence, steps), seed in zip(starts, seeds, strict=True):
            sequences.append(sequence.cut_after(steps, Uniforms(seed)))
        return self.finish(sequences, retrieve)

    def end_again(
        self,
        sequences: list[Sequence],
        seeds: list[str],
        retrieve: Retrieve,
    ) -> list[Sequence]:
        """Samples another last turn of each finished sequence, from the stream of its own seed.

        Sequences may repeat, with different seeds: their common prefix is prefilled once. See `Sequence.reopened`.
        """
        reopened = []
        for sequence, seed in zip(sequences, seeds, strict=True):
            reopened.append(sequence.reopened(Uniforms(seed)))
        return self.finish(reopened, retrieve)

    @torch.no_grad()
    def finish(
        self,
        sequences: list[Sequence],
        retrieve: Retrieve,
        progress: str | None = None,
        quiet: bool = False,
    ) -> list[Sequence]:
        """Samples opened sequences to their ends, in place; returns them. `quiet`: without a progress bar."""
        if not sequences:  # a rank has none if there are more ranks than episodes
            return []
        training = self.model.training
        self.model.eval()  # no dropout, so that the trainer computes the same probabilities
        bar_style = bars.named(progress, "answering")
        if quiet:
            bar_style = bar_style | {"disable": True}
        bar = tqdm(total=len(sequences), unit="episode", **bar_style)
        lines = bars.TimedLines(bar, progress, "episodes")
        try:
            with self.autocast(), closing(Fetcher(retrieve, self.spans)) as fetcher, bar:
                retrieving = [s for s in sequences if s.pending]  # baselines, which retrieve before the first turn
                if retrieving:
                    for sequence, documents in fetcher.fetch(retrieving):
                        self._splice(sequence, documents)
                unfinished = [s for s in sequences if s.finish is None]
                lines.update(len(sequences) - len(unfinished))
                row_count = min(self.grant.memory.rollout_batch_size, len(unfinished))
                scheduler, decoder = self.build_scheduler_and_decoder(unfinished, row_count)
                # No weight changes while sampling, so the adapter is cast to the dtype of the passes only once.
                with cast_once(self.model, self.model.head_weight.dtype):
                    while scheduler.waiting or scheduler.rows:
                        self.iterate(scheduler, decoder, fetcher, on_finish=lines.update)
                        lines.tick()
        finally:
            self.model.train(training)
        return sequences

    def build_scheduler_and_decoder(self, sequences: list[Sequence], row_count: int) -> tuple[Scheduler, Decoder]:
        """Returns a scheduler of the sequences with a new KV cache of `row_count` rows, and a decoder of that cache."""
        cache = KVCache.of(self.model, row_count)
        drafter = drafter_of(self.model, self.draft_tokens, self.layout.tokenizer.stop_id, sequences=sequences)
        has_graphs = cache.device.type == "cuda" and not self.model.layer_stream  # a graph cannot copy from the host
        if has_graphs:
            decoder = GraphDecoder(self.model, cache, self.layout.lengths.max_length, drafter=drafter)
        else:
            decoder = Decoder(self.model, cache, drafter)
        return Scheduler(list(sequences), cache), decoder

    def iterate(
        self,
        scheduler: Scheduler,
        decoder: Decoder,
        fetcher: Fetcher,
        on_finish: Callable,
    ) -> None:
        """Samples one more token of each running sequence, or several with drafts, and closes the turns that this ends.

        Sequences with queries are parked until their documents have come. `on_finish()` is called for each episode
        that ends.
        """
        scheduler.admit()
        for sequence, documents in fetcher.collect(idle=not scheduler.active):
            self._splice(sequence, documents)
            scheduler.unpark(sequence)
            if sequence.finish is not None:  # neither documents nor an answer fit
                scheduler.release(sequence)
                on_finish()
        for sequence in scheduler.running:
            sequence.note_turn_start(self.spans)
        self._prefill(scheduler)
        for sequence in self._decode(scheduler, decoder):
            layout = self.layout_of(sequence)
            turn_is_over = layout.turn_is_over(sequence)
            if sequence.listener:
                sequence.listener.hear(layout.turn_text.readable(sequence, turn_is_over), turn_is_over)
            if turn_is_over:
                self._close_turn(sequence)
                self._free_or_park(sequence, scheduler, fetcher=fetcher, on_finish=on_finish)
        fetcher.send(idle=not scheduler.active)

    def _close_turn(self, sequence: Sequence) -> None:
        """Reads the step of a turn that is over, which may end the episode."""
        sequence.record_turn(self.spans)
        self.layout_of(sequence).close_turn(sequence)
        # An incomplete step still gets its documents, or a forced answer in the next turn.
        step_is_complete = not sequence.pending and not sequence.forced_step
        if sequence.listener and step_is_complete:
            sequence.listener.step(sequence)

    def _free_or_park(
        self,
        sequence: Sequence,
        scheduler: Scheduler,
        fetcher: Fetcher,
        on_finish: Callable,
    ) -> None:
        """Frees the row of a sequence that has ended, and parks one that has queries while they are answered."""
        if sequence.finish is not None:
            scheduler.release(sequence)
            on_finish()
        elif sequence.pending:
            fetcher.ask(sequence)
            scheduler.park(sequence)

    def _splice(self, sequence: Sequence, documents: list[list[Document]]) -> None:
        """Appends the documents of a sequence's pending queries, which completes its last step.

        If no document fits, the step is taken back, to be completed by a forced answer.
        """
        step_count = len(sequence.steps)
        self.layout_of(sequence).splice(sequence, documents)
        step_is_complete = len(sequence.steps) == step_count
        if sequence.listener and step_is_complete:
            sequence.listener.step(sequence)

    def _prefill(self, scheduler: Scheduler) -> None:
        """Puts all tokens of the running sequences into the cache, except the last of each, which `_decode` runs."""
        scheduler.split()  # sequences that share a row may have got different documents
        cache = scheduler.cache
        limit = self.grant.memory.micro_batch_tokens
        for parts in prefills(scheduler.rows, scheduler.active, cache, limit=limit):
            prefill = Prefill(cache, parts)
            self.model(prefill.tokens, prefill)

    def _decode(self, scheduler: Scheduler, decoder: Decoder) -> list[Sequence]:
        """Runs the last token of each running sequence and samples its next one; returns the sequences that got one.

        With drafts, a sequence may get several tokens. The model runs a row once for all sequences that share it.
        """
        rows = scheduler.running_rows
        if not rows:
            return []
        drafts, hidden = self._run(rows, decoder)
        # First samples what follows each token of the pass. Then appends a sequence's samples up to the first that
        # differs from its draft; without a draft there is one.
        agreement = append_sampled(
            rows,
            drafts,
            sample=partial(self._sampled_tokens, hidden, self._logits(hidden)),
            append=self._append,
            turn_is_over=lambda sequence: self.layout_of(sequence).turn_is_over(sequence),
        )
        if any(drafts):
            decoder.drafter.count(agreement)
        sampled_sequences = [sequence for row in rows for sequence in row if id(sequence) not in agreement.not_finite]
        scheduler.split()  # sequences that share a row may have sampled different tokens, and drafts were rejected
        return sampled_sequences

    def _run(self, rows: list[list[Sequence]], decoder: Decoder) -> tuple[list[list[int]], Tensor]:
        """Runs the last token of each row and the draft behind it; returns the drafts and the hidden states [N, C].

        All drafts are empty if the decoder has no drafter, if no draft would save time, if more than DRAFTING_SEQUENCES
        run, or if a number of their pass is not finite.
        """
        firsts = [row[0] for row in rows]
        drafts: list[list[int]] = []
        # The limit counts sequences, not rows: those of one row share its draft and its pass, but each needs logits of
        # its own, for which the memory plan has room.
        if decoder.drafter and sum(map(len, rows)) <= DRAFTING_SEQUENCES:
            limits = draft_limits(rows, decoder.draft_limit(len(rows)), self.layout_of)
            drafts = decoder.drafter.propose(firsts, limits)
        if any(drafts):
            hidden = decoder.run_drafts(
                [[first.tokens[-1], *draft] for first, draft in zip(firsts, drafts, strict=True)]
            )
            if hidden is not None:  # else a number is not finite, perhaps because of a draft
                return drafts, hidden
        return [[]] * len(rows), decoder([first.tokens[-1] for first in firsts])

    def _logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [N, V] of the tokens that may be sampled after hidden states [N, C]."""
        logits = linear(hidden, self.model.head_weight)
        logits[:, self.layout.tokenizer.size :] = -math.inf  # padding rows of the embedding are never sampled
        return logits

    def _sampled_tokens(
        self,
        hidden: Tensor,
        logits: Tensor,
        batch: SamplingBatch,
    ) -> list[SampledToken]:
        """Samples the tokens of a batch from a pass's hidden states [N, C] and logits [N, V].

        `batch.indices` has the place of each entry in `hidden` and in `logits`; None: an entry for each, in order.
        """
        if batch.indices is not None:
            indices = torch.tensor(batch.indices).to(hidden.device, non_blocking=True)
            hidden = hidden[indices]
            logits = logits[indices]
        sampled_ids, sampled_logprobs = self._sample(logits, batch)  # one for each entry of the batch
        numbers = [sampled_ids.to(sampled_logprobs), sampled_logprobs]
        if self.value_head is not None:
            numbers.append(self.value_head(hidden).to(sampled_logprobs))
        # One transfer, because each waits for the device. Token ids are exact in fp32.
        columns = torch.stack(numbers).tolist()
        return [SampledToken(*numbers_of_token) for numbers_of_token in zip(*columns, strict=True)]

    def _append(self, sequence: Sequence, sampled: SampledToken) -> bool:
        """Appends a sampled token to a sequence; returns False if the sequence failed, as its logits are not finite."""
        if math.isnan(sampled.logprob):
            error = overflow_error(self.model, sequence.tokens, sequence.question.id)
            self._fail(sequence, error)  # raises; a LaneEngine (lanes.py) marks the sequence and goes on
            return False
        sequence.stream.drop()  # the number by which the token was sampled: `SamplingBatch.uniforms` only looks ahead
        sequence.write([int(sampled.id)])
        sequence.logprobs.append(sampled.logprob)
        sequence.values.append(sampled.value)
        return True

    def _fail(self, sequence: Sequence, error: NotFinite) -> None:
        """Raises `error`, which ends the run: a model whose logits are not finite is broken.

        `lanes.LaneEngine` overrides this: it ends this sequence alone, and returns.
        """
        raise error

    def _sample(self, logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
        """Returns tokens [B] and their log-probabilities [B] from logits [B, V], each by its sequence's own stream.

        `lanes.LaneEngine` overrides this: its sequences have samplers of their own.
        """
        return self.sampler(logits, batch.uniforms)
