"""Samples episodes: a step schedules, runs and looks at what came; documents are fetched meanwhile.

Knows the token layout of an episode and the step format; is handed a function that retrieves, and imports no
retriever. Weights are those of the model it is given: the trainer's own, with whatever adapter is switched in.
"""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from r3lite.episode import ANSWERED, CUT_OFF, MALFORMED, Document, Question
from r3lite.errors import R3LiteError
from r3lite.models.hooks import ActivationWatch
from r3lite.models.kv_cache import KVCache, Prefill
from r3lite.models.lora import cast_once
from r3lite.models.qwen2 import Qwen2
from r3lite.protocols.r3 import Prompts, R3Format
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.rollout.decoder import Decoder, GraphDecoder
from r3lite.rollout.fetcher import Fetcher, Retrieve
from r3lite.rollout.sampling import Sampler
from r3lite.rollout.scheduler import Scheduler
from r3lite.rollout.sequence import Sequence
from r3lite.settings import LengthSettings

ANSWER_ROOM = 32  # tokens kept free for a forced answer, as long as the limit of an episode allows
LEAST_DOCUMENT = 16  # a document is not cut below this many tokens; it is dropped instead


@dataclass
class Engine:
    """Rollout engine of one model. `value_head`, where given, values each sampled token's state on the way."""

    model: Qwen2
    tokenizer: Tokenizer
    prompts: Prompts
    lengths: LengthSettings
    sampler: Callable[[Tensor, list[float]], tuple[list[int], list[float]]] = Sampler()
    rollout_batch_size: int = 16
    read_tokens: int = 4096  # given tokens read in one pass; a longer row is read in pieces
    value_head: nn.Module | None = None
    autocast: Callable[[], AbstractContextManager] = nullcontext
    format: R3Format = R3Format()
    closing: dict[int, bool] = field(default_factory=dict)  # tokens already looked at by _may_end_stop_string

    @torch.no_grad()
    def run(
        self, questions: list[Question], seeds: list[str], retrieve: Retrieve, progress: str | None = None
    ) -> list[Sequence]:
        """One episode per question, each drawing from the random stream of its own seed.

        Questions may repeat (with different seeds). `progress` names a progress bar.
        """
        sequences = [self._open(q, seed) for q, seed in zip(questions, seeds, strict=True)]
        training = self.model.training
        self.model.eval()  # no dropout: the policy that samples is the policy that is trained
        bar = tqdm(total=len(sequences), desc=progress, unit="episode", disable=None if progress else True)
        try:
            with self.autocast(), Fetcher(retrieve) as fetcher, bar:
                self._prepare(sequences, retrieve)
                self.run_sequences([s for s in sequences if s.finish is None], fetcher, bar.update)
        finally:
            self.model.train(training)
        return sequences

    def _prepare(self, sequences: list[Sequence], retrieve: Retrieve) -> None:
        """What baselines do before the model's first turn."""

    def _open(self, question: Question, seed: str) -> Sequence:
        sequence = Sequence(question, random.Random(seed))
        sequence.observe(self.tokenizer.open_chat(self.prompts.opening(question.text), self.prompts.system))
        if len(sequence.tokens) + ANSWER_ROOM > self.lengths.max_length:
            raise R3LiteError(
                f"question {question.id} and its prompt take {len(sequence.tokens)} tokens; "
                f"--max-length {self.lengths.max_length} leaves no room for an answer",
                "Raise --max-length, shorten the prompt file, or remove the question.",
            )
        return sequence

    def run_sequences(self, sequences: list[Sequence], fetcher: Fetcher, over: Callable[[], object]) -> None:
        """Runs opened sequences to their ends; `over` is called at each."""
        cache = self._cache(min(self.rollout_batch_size, len(sequences)))
        if cache.device.type == "cuda":
            decoder = GraphDecoder(self.model, cache, self.lengths.max_length)
        else:
            decoder = Decoder(self.model, cache)
        with cast_once(self.model, self.model.head_weight.dtype):
            self._steps(Scheduler(sequences, cache), decoder, fetcher, over)

    def _steps(self, scheduler: Scheduler, decoder: Decoder, fetcher: Fetcher, over: Callable[[], object]) -> None:
        while scheduler.unfinished:
            scheduler.admit()
            for sequence, documents in fetcher.collect(idle=not scheduler.active):
                self._splice(sequence, documents)
                scheduler.unpark(sequence)
                if sequence.finish is not None:  # there was no room for documents, nor for an answer
                    scheduler.release(sequence)
                    over()
            self._prefill(scheduler)
            self._decode(scheduler, decoder)
            for sequence in scheduler.at_work:
                if sequence.turn_over:
                    self._close_turn(sequence)
                if sequence.finish is not None:
                    scheduler.release(sequence)
                    over()
                elif sequence.turn_over:
                    fetcher.ask(sequence)
                    scheduler.park(sequence)
            fetcher.send(idle=not scheduler.active)

    def _cache(self, rows: int) -> KVCache:
        config, weight = self.model.config, self.model.head_weight
        shape = config.num_hidden_layers, rows, config.num_key_value_heads, config.head_dim
        return KVCache(*shape, weight.dtype, weight.device)

    def _prefill(self, scheduler: Scheduler) -> None:
        """Reads what the rows at work were given, but for the last token of each, which `_decode` runs."""
        for given in self._passes([s.tokens[s.cached : -1] for s in scheduler.at_work]):
            prefill = Prefill(scheduler.cache, given)
            self.model(prefill.tokens, prefill)
            prefill.end()
            for row, tokens in given:
                scheduler.rows[row].cached += len(tokens)

    def _passes(self, pending: list[list[int]]) -> Iterator[list[tuple[int, list[int]]]]:
        """Rows and tokens that are read together, at most `read_tokens`, of what each row has before it."""
        given, room = [], self.read_tokens
        for row, tokens in enumerate(pending):
            while tokens:
                given.append((row, tokens[:room]))
                room, tokens = room - len(given[-1][1]), tokens[room:]
                if not room:
                    yield given
                    given, room = [], self.read_tokens
        if given:
            yield given

    def _decode(self, scheduler: Scheduler, decoder: Decoder) -> None:
        """Runs the last token of each row at work and samples the next one."""
        rows = scheduler.at_work
        if not rows:
            return
        hidden = decoder([s.tokens[-1] for s in rows])  # [B, C]
        # Padding rows of the embedding are never sampled.
        logits = F.linear(hidden, self.model.head_weight[: self.tokenizer.size])  # [B, V]
        values = self.value_head(hidden).tolist() if self.value_head is not None else [0.0] * len(rows)
        tokens, logprobs = self._sample(logits, rows)
        for sequence, logprob in zip(rows, logprobs):
            if math.isnan(logprob):
                self._explain_overflow(sequence)
        for sequence, token, logprob, value in zip(rows, tokens, logprobs, values, strict=True):
            sequence.cached += 1
            sequence.act(token, logprob, value)
            sequence.turn_over = self._turn_is_over(sequence)

    def _explain_overflow(self, sequence: Sequence) -> NoReturn:
        with ActivationWatch(self.model) as watch:
            self.model(torch.tensor([sequence.tokens], device=self.model.head_weight.device))
        raise R3LiteError(
            f"question {sequence.question.id}: what the model says is not a number: {watch.report()}",
            "Pass --dtype bf16 or --dtype fp32, whose numbers reach further; or start from a sounder adapter.",
        )

    def _sample(self, logits: Tensor, rows: list[Sequence]) -> tuple[list[int], list[float]]:
        """One token and its log-probability per row, from logits [B, V]; each row draws from its own stream."""
        return self.sampler(logits, [s.stream.random() for s in rows])

    def _turn_is_over(self, sequence: Sequence) -> bool:
        turn = sequence.turn
        if turn[-1] == self.tokenizer.stop_id:
            return True
        if len(turn) >= self.lengths.max_new_tokens or len(sequence.tokens) >= self.lengths.max_length:
            return True
        return self._may_end_stop_string(turn[-1]) and any(
            # A stop string of n characters spans at most n tokens, and it is only now complete if it ends in this one.
            s in self.tokenizer.decode(turn[-len(s) :])
            for s in self.format.stop_strings
        )

    def _may_end_stop_string(self, token: int) -> bool:
        """Whether a token has a stop string's last character: few have, so that little text is decoded."""
        if token not in self.closing:
            text = self.tokenizer.decode([token])
            self.closing[token] = any(s[-1] in text for s in self.format.stop_strings)
        return self.closing[token]

    def _close_turn(self, sequence: Sequence) -> None:
        """Reads the finished turn as a step and decides how the episode goes on."""
        ended = sequence.turn[-1] == self.tokenizer.stop_id
        text = sequence.opening + self.tokenizer.decode(sequence.turn)
        step = self.format.parse(text, len(sequence.steps) + 1, sequence.queries)
        forced = bool(sequence.opening)
        if not ended and not any(s in text for s in self.format.stop_strings):
            step = replace(step, query=None, answer=None, faults=("cut_off",))
            sequence.finish = CUT_OFF
        elif step.answer is not None:
            sequence.finish = ANSWERED
        elif step.query is None or forced:
            sequence.finish = MALFORMED
        elif len(sequence.queries) >= self.lengths.max_hops:
            step = replace(step, query=None, faults=(*step.faults, "answer_was_forced"))
        sequence.add_step(step)
        if sequence.finish is None and step.query is None:
            self._force_answer(sequence, ended)

    def _force_answer(self, sequence: Sequence, ended: bool) -> None:
        """Opens a last turn in which only the answer is left to write, or cuts the episode off where it has no room."""
        request = ([] if ended else [self.tokenizer.stop_id]) + self.tokenizer.user_turn(self.format.answer_request)
        opening = self.format.forced_answer(len(sequence.steps) + 1)
        given = request + self.tokenizer.encode(opening)
        if len(sequence.tokens) + len(given) >= self.lengths.max_length:
            sequence.finish = CUT_OFF
            return
        sequence.observe(given)
        sequence.opening = opening

    def _splice(self, sequence: Sequence, documents: list[Document]) -> None:
        """Gives a sequence the documents of its query; where there is no room for any, an answer is asked for."""
        ended = sequence.tokens[-1] == self.tokenizer.stop_id
        documents, given = self._fit(sequence, documents, [] if ended else [self.tokenizer.stop_id])
        if given is None:
            step = sequence.steps[-1]
            sequence.steps[-1] = replace(step, query=None, faults=(*step.faults, "answer_was_forced"))
            self._force_answer(sequence, ended)
        else:
            sequence.steps[-1] = sequence.steps[-1].with_documents(documents)
            sequence.observe(given)

    def _fit(
        self, sequence: Sequence, documents: list[Document], before: list[int]
    ) -> tuple[list[Document], list[int] | None]:
        """Documents cut, or dropped from the end, until a whole turn and a forced answer still fit after them.

        The documents as the model will see them and the tokens to splice in; None where not even the first one fits.
        """
        forced = len(self.tokenizer.user_turn(self.format.answer_request)) + len(
            self.tokenizer.encode(self.format.forced_answer(1))
        )
        room = self.lengths.max_length - len(sequence.tokens) - self.lengths.max_new_tokens - forced - ANSWER_ROOM
        limit, kept = self.lengths.max_document_tokens, list(documents)
        while True:
            cut = [replace(d, text=self.tokenizer.cut(d.text, limit)) for d in kept]
            given = before + self.tokenizer.user_turn(self.prompts.documents(cut, len(sequence.steps) + 1))
            if len(given) <= room:
                return cut, given
            if limit // 2 >= LEAST_DOCUMENT:
                limit //= 2
            elif len(kept) > 1:
                kept.pop()
            else:
                return [], None
