"""Samples episodes: prefill, decode until every turn is over, retrieve for all that wait, and again.

Knows the token layout of an episode and the step format; is handed a function that retrieves, and imports no
retriever. Weights are those of the model it is given: the trainer's own, with whatever adapter is switched in.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from r3lite.episode import ANSWERED, CUT_OFF, MALFORMED, Document, Question
from r3lite.errors import R3LiteError
from r3lite.formats import Prompts, R3Format
from r3lite.models.kv_cache import KVCache
from r3lite.models.qwen2 import Qwen2
from r3lite.models.tokenizer import Tokenizer
from r3lite.rollout.sampling import Sampler
from r3lite.rollout.sequence import Sequence
from r3lite.settings import LengthSettings

Retrieve = Callable[[list[tuple[Question, str]]], list[list[Document]]]
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
    read_tokens: int = 4096  # given tokens read in one pass, padding included; a longer row is read alone
    value_head: nn.Module | None = None
    autocast: Callable[[], AbstractContextManager] = nullcontext
    format: R3Format = R3Format()

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
        try:
            with tqdm(total=len(sequences), desc=progress, unit="episode", disable=None if progress else True) as bar:
                for start in range(0, len(sequences), self.rollout_batch_size):
                    batch = sequences[start : start + self.rollout_batch_size]
                    with self.autocast():
                        self._run_batch(batch, retrieve)
                    bar.update(len(batch))
        finally:
            self.model.train(training)
        return sequences

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

    def _run_batch(self, sequences: list[Sequence], retrieve: Retrieve) -> None:
        config, weight = self.model.config, self.model.head_weight
        cache = KVCache(
            config.num_hidden_layers,
            len(sequences),
            config.num_key_value_heads,
            config.head_dim,
            weight.dtype,
            weight.device,
        )
        rows = list(sequences)  # rows[i] is in row i of the cache; the first `active` of them are at work
        active = len(rows)
        while active:
            self._decode_turns(rows, active, cache)
            for sequence in rows[:active]:
                self._close_turn(sequence)
            self._retrieve([s for s in sequences if s.finish is None], retrieve)
            active = _to_front(rows, active, cache, lambda s: s.finish is None)

    def _decode_turns(self, rows: list[Sequence], active: int, cache: KVCache) -> None:
        """Reads what the cache does not hold yet of the first `active` rows, then samples until their turns end."""
        weight = self.model.head_weight[: self.tokenizer.size]  # padding rows of the embedding are never sampled
        hidden = self._read(rows[:active], cache)  # [B, C]
        while True:
            logits = F.linear(hidden, weight)  # [B, V]
            values = self.value_head(hidden).tolist() if self.value_head is not None else [0.0] * active
            tokens, logprobs = self._sample(logits, rows[:active])
            for sequence, token, logprob, value in zip(rows, tokens, logprobs, values):
                sequence.act(token, logprob, value)
                sequence.turn_over = self._turn_is_over(sequence)
            active = _to_front(rows, active, cache, lambda s: not s.turn_over)
            if not active:
                return
            hidden = self._read(rows[:active], cache)

    def _sample(self, logits: Tensor, rows: list[Sequence]) -> tuple[list[int], list[float]]:
        """One token and its log-probability per row, from logits [B, V]; each row draws from its own stream."""
        return self.sampler(logits, [s.stream.random() for s in rows])

    def _read(self, rows: list[Sequence], cache: KVCache) -> Tensor:
        """Runs the model over the tokens that the cache lacks; hidden states [B, C] at each row's last token."""
        pending = [s.tokens[s.cached :] for s in rows]
        last = [self._read_group(pending[start:stop], start, cache) for start, stop in self._groups(pending)]
        for sequence in rows:
            sequence.cached = len(sequence.tokens)
        return torch.cat(last)

    def _groups(self, pending: list[list[int]]) -> Iterator[tuple[int, int]]:
        """Neighbouring rows that are read together: (first, one past the last)."""
        start, longest = 0, 0
        for i, tokens in enumerate(pending):
            longest = max(longest, len(tokens))
            if i > start and longest * (i + 1 - start) > self.read_tokens:
                yield start, i
                start, longest = i, len(tokens)
        yield start, len(pending)

    def _read_group(self, pending: list[list[int]], first_row: int, cache: KVCache) -> Tensor:
        T, device = max(map(len, pending)), cache.lengths.device
        ids = torch.tensor([p + [self.tokenizer.pad_id] * (T - len(p)) for p in pending], device=device)  # [B, T]
        counts = torch.tensor([len(p) for p in pending], device=device)  # [B]
        hidden = self.model(ids, cache, counts, first_row)  # [B, T, C]
        return hidden[torch.arange(len(pending), device=device), counts - 1]

    def _turn_is_over(self, sequence: Sequence) -> bool:
        turn = sequence.turn
        if turn[-1] == self.tokenizer.stop_id:
            return True
        if len(turn) >= self.lengths.max_new_tokens or len(sequence.tokens) >= self.lengths.max_length:
            return True
        # A stop string of n characters spans at most n tokens, and it is only now complete if it ends in this one.
        return any(s in self.tokenizer.decode(turn[-len(s) :]) for s in self.format.stop_strings)

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

    def _retrieve(self, sequences: list[Sequence], retrieve: Retrieve) -> None:
        """Brings the documents of every waiting query and splices them in."""
        waiting = [s for s in sequences if s.turn_over]
        if not waiting:
            return
        found = retrieve([(s.question, s.steps[-1].query) for s in waiting])
        for sequence, documents in zip(waiting, found, strict=True):
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


def _to_front(rows: list[Sequence], active: int, cache: KVCache, goes_on: Callable[[Sequence], bool]) -> int:
    """Moves the first `active` rows that go on before those that do not; returns how many go on."""
    i = 0
    while i < active:
        if goes_on(rows[i]):
            i += 1
        else:
            active -= 1
            rows[i], rows[active] = rows[active], rows[i]
            cache.swap(i, active)
    return active
