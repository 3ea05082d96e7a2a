"""The rollout engine: samples episodes by continuous batching, and fetches their documents meanwhile.

An iteration admits waiting sequences, prefills prompts and documents, samples a token of each running sequence, and
closes the turns that are over. A `Layout` decides how an episode opens and goes on; the engine itself knows no step
format and no retriever. The engine samples with the model's active adapter.
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
    # (logits [B, V], B uniform numbers) -> (tokens [B], their log-probabilities [B]), such as a sampling.Sampler.
    sampler: Callable[[Tensor, list[float]], tuple[Tensor, Tensor]]
    grant: Grant  # limits how many episodes run at a time, and how many tokens one prefill has
    value_head: nn.Module | None = None  # hidden states [B, C] -> values [B] of the states before the next tokens
    autocast: Callable[[], AbstractContextManager] = nullcontext
    spans: Spans = NO_SPANS
    layouts: Mapping[str, Layout] = field(default_factory=dict)  # by Question.source; other sources have `layout`
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
        """Samples another continuation for each pair (finished sequence, number of its first steps that are kept).

        Tokens, log-probabilities and values of the kept steps are copied. Each continuation has the random stream of
        its own seed.
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
        """Samples another last turn of each finished sequence, see `Sequence.reopened`. Each has a seed of its own.

        Sequences may repeat, with different seeds: their common prefix is prefilled once.
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
        """Samples opened sequences in place until each has ended, and returns them.

        `progress`: the name of a progress bar that stays; None: the bar is erased at the end. `quiet`: no bar.
        """
        if not sequences:  # a rank has none if there are more ranks than episodes
            return []
        was_training = self.model.training
        self.model.eval()  # no dropout while sampling; RL has none in updates either (rl_setup.py)
        bar_style = bars.named(progress, "answering")
        if quiet:
            bar_style = bar_style | {"disable": True}
        bar = tqdm(total=len(sequences), unit="episode", **bar_style)
        progress_bar = bars.TimedLines(bar, progress, "episodes")  # moves the bar, or prints lines if it is not drawn
        try:
            with self.autocast(), closing(Fetcher(retrieve, self.spans)) as fetcher, bar:
                # Some baselines retrieve before the first turn.
                retrieving = [sequence for sequence in sequences if sequence.pending]
                if retrieving:
                    for sequence, documents in fetcher.fetch(retrieving):
                        self._splice(sequence, documents)
                # A sequence is finished already if its prompt and documents leave no room for an answer.
                unfinished = [sequence for sequence in sequences if sequence.finish is None]
                progress_bar.update(len(sequences) - len(unfinished))
                row_count = min(self.grant.memory.rollout_batch_size, len(unfinished))
                scheduler, decoder = self.build_scheduler_and_decoder(unfinished, row_count)
                # No weight changes while sampling: the adapter is cast to the model's dtype once, not in each pass.
                with cast_once(self.model, self.model.head_weight.dtype):
                    while scheduler.waiting or scheduler.rows:
                        self.iterate(scheduler, decoder, fetcher, on_finish=progress_bar.update)
                        progress_bar.tick()
        finally:
            self.model.train(was_training)
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
        """Samples one more token of each running sequence, or several with drafts, and closes the turns that are over.

        Rows whose sequences have queries are parked until the documents have come. `on_finish()` is called for each
        episode that ends.
        """
        scheduler.admit()
        for sequence, documents in fetcher.collect(idle=not scheduler.running_count):
            self._splice(sequence, documents)
            scheduler.unpark(sequence)
            if sequence.finish is not None:  # neither the documents nor a forced answer fit
                scheduler.release(sequence)
                on_finish()
        for sequence in scheduler.running:
            sequence.note_turn_start(self.spans)
        self._prefill(scheduler)
        for sequence in self._decode(scheduler, decoder):
            layout = self.layout_of(sequence)
            turn_is_over = layout.turn_is_over(sequence)
            if sequence.listener:
                readable = layout.turn_text.readable(sequence, turn_is_over)
                sequence.listener.send_text(readable, turn_is_over)
            if turn_is_over:
                self._close_turn(sequence)
                self._free_or_park(sequence, scheduler, fetcher=fetcher, on_finish=on_finish)
        fetcher.end_iteration(idle=not scheduler.running_count)

    def _close_turn(self, sequence: Sequence) -> None:
        """Parses a turn that is over into a step, which may end the episode."""
        sequence.record_turn(self.spans)
        self.layout_of(sequence).close_turn(sequence)
        # A step that waits for documents, or for a forced answer in the next turn, is not complete.
        step_is_complete = not sequence.pending and not sequence.forced_step
        if sequence.listener and step_is_complete:
            sequence.listener.on_step(sequence)

    def _free_or_park(
        self,
        sequence: Sequence,
        scheduler: Scheduler,
        fetcher: Fetcher,
        on_finish: Callable,
    ) -> None:
        """Removes a sequence from its row if it has ended; if it searches, queues its queries and parks it."""
        if sequence.finish is not None:
            scheduler.release(sequence)
            on_finish()
        elif sequence.pending:
            fetcher.queue(sequence)
            scheduler.park(sequence)

    def _splice(self, sequence: Sequence, documents: list[list[Document]]) -> None:
        """Appends the documents of a sequence's pending queries, which completes its last step.

        If no document fits, the layout removes the step, in order to add it again with a forced answer.
        """
        step_count = len(sequence.steps)
        self.layout_of(sequence).splice(sequence, documents)
        step_is_complete = len(sequence.steps) == step_count
        if sequence.listener and step_is_complete:
            sequence.listener.on_step(sequence)

    def _prefill(self, scheduler: Scheduler) -> None:
        """Runs all tokens of the running rows that are not cached, except the last of each, which `_decode` runs."""
        # Sequences that share a row may have got different documents even for equal queries: one retrieval may have
        # failed, or a web service may have answered differently.
        scheduler.split()
        cache = scheduler.cache
        limit = self.grant.memory.micro_batch_tokens
        # All rows: parked ones are not run, but prefixes may be copied from them.
        for additions in prefills(scheduler.rows, scheduler.running_count, cache, limit=limit):
            prefill = Prefill(cache, additions)
            self.model(prefill.tokens, prefill)

    def _decode(self, scheduler: Scheduler, decoder: Decoder) -> list[Sequence]:
        """Runs the last token of each running row, and samples the next token of each sequence of the row.

        With drafts, a sequence may get several tokens. Returns the running sequences without those that failed.
        """
        rows = scheduler.running_rows
        if not rows:
            return []
        drafts, hidden = self._run(rows, decoder)
        logits = self._logits(hidden)
        result = append_sampled(
            rows,
            drafts,
            sample=partial(self._sampled_tokens, hidden, logits),
            append=self._append,
            turn_is_over=lambda sequence: self.layout_of(sequence).turn_is_over(sequence),
        )
        if any(drafts):
            decoder.drafter.record(result)
        # Sequences that share a row may have got different tokens, and rejected drafts are still in the cache.
        scheduler.split()
        return result.surviving

    def _run(self, rows: list[list[Sequence]], decoder: Decoder) -> tuple[list[list[int]], Tensor]:
        """Runs the last token of each row and a draft of its next tokens; returns the drafts and hidden states [N, C].

        N counts the last tokens and the drafted ones, row by row. All drafts are empty if the decoder has no drafter,
        if no draft would save time, if more than DRAFTING_SEQUENCES sequences run, or if a hidden state of the pass
        with drafts is not finite.
        """
        firsts = [row[0] for row in rows]  # all sequences of a row have the same tokens
        drafts: list[list[int]] = []
        # DRAFTING_SEQUENCES limits the memory of logits. It counts sequences, not rows: the sequences of a row share
        # its draft and its pass, but each needs logits of its own.
        if decoder.drafter and sum(map(len, rows)) <= DRAFTING_SEQUENCES:
            limits = draft_limits(rows, decoder.draft_limit(len(rows)), self.layout_of)
            drafts = decoder.drafter.propose(firsts, limits)
        if any(drafts):
            additions = [[first.tokens[-1], *draft] for first, draft in zip(firsts, drafts, strict=True)]
            hidden = decoder.run_drafts(additions)
            if hidden is not None:
                return drafts, hidden
            # A hidden state is not finite, perhaps because of a draft: the rows are run again without drafts.
        last_tokens = [first.tokens[-1] for first in firsts]
        return [[]] * len(rows), decoder(last_tokens)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [N, V] after hidden states [N, C]; -infinity for ids that the tokenizer does not have."""
        logits = linear(hidden, self.model.head_weight)  # on a CPU, in fp32, faster than `CausalLM.logits`
        logits[:, self.layout.tokenizer.size :] = -math.inf  # padding rows of the embedding are never sampled
        return logits

    def _sampled_tokens(
        self,
        hidden: Tensor,
        logits: Tensor,
        batch: SamplingBatch,
    ) -> list[SampledToken]:
        """Samples one token for each entry of a batch, from a pass's hidden states [N, C] and logits [N, V].

        Entry i is sampled from row `batch.indices[i]` of both tensors. If `batch.indices` is None, the batch has N
        entries, and entry i is sampled from row i.
        """
        if batch.indices is not None:
            indices = torch.tensor(batch.indices).to(hidden.device, non_blocking=True)
            hidden = hidden[indices]
            logits = logits[indices]
        ids, logprobs = self._sample(logits, batch)
        # The fields of SampledToken, stacked so that one transfer from the device is enough: each transfer waits for
        # the device. As fp32 numbers, token ids stay exact.
        fields = [ids.to(logprobs), logprobs]
        if self.value_head is not None:
            fields.append(self.value_head(hidden).to(logprobs))
        columns = torch.stack(fields).tolist()
        return [SampledToken(*values) for values in zip(*columns, strict=True)]

    def _append(self, sequence: Sequence, sampled: SampledToken) -> bool:
        """Appends a sampled token to a sequence and returns True.

        If the logits were not finite, calls `_fail` instead, and returns False if that does not raise
        (`lanes.LaneEngine`).
        """
        if math.isnan(sampled.logprob):
            error = overflow_error(self.model, sequence.tokens, sequence.question.id)
            self._fail(sequence, error)
            return False
        # The token was sampled with the stream's next number, which `SamplingBatch.uniforms` read but did not remove.
        sequence.stream.advance()
        sequence.write([int(sampled.id)])
        sequence.logprobs.append(sampled.logprob)
        sequence.values.append(sampled.value)
        return True

    def _fail(self, sequence: Sequence, error: NotFinite) -> None:
        """Raises `error`, which ends the run: a model whose logits are not finite is broken.

        `lanes.LaneEngine` overrides this method: there only the sequence ends, and the method returns.
        """
        raise error

    def _sample(self, logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
        """Returns tokens [B] and their log-probabilities [B], sampled from logits [B, V] with the batch's uniforms.

        `lanes.LaneEngine` overrides this method: its sequences have samplers of their own.
        """
        return self.sampler(logits, batch.uniforms)
