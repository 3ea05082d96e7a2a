"""Which sequence is in which row of the KV cache.

Rows 0 .. active-1 are running; those after them are parked while they wait for documents, so that the model runs on
running rows only. A sequence that ends frees its row for the next waiting one. Runs no model.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from r3lite.models.kv_cache import KVCache
from r3lite.rollout.sequence import Sequence

LEAST_SHARED = 16  # a shorter common prefix is prefilled again rather than copied


class CommonPrefix(NamedTuple):
    """What a sequence has in common with the rows of a cache."""

    row: int  # the row with the longest prefix of the sequence that is in the cache
    cached_length: int  # number of tokens of that prefix
    length_after_prefill: int  # the longest prefix shared with a row that is not prefilled so far; 0 if there is none


@dataclass
class Scheduler:
    """Assigns sequences to the rows of a cache, first come, first served."""

    waiting: list[Sequence]  # without a row
    cache: KVCache
    rows: list[Sequence] = field(default_factory=list)  # rows[i] is in row i of the cache
    active: int = 0  # number of running rows, which come first
    last_released: Sequence | None = None  # if all rows are free, row 0 of the cache still has its tokens

    @property
    def running(self) -> list[Sequence]:
        return self.rows[: self.active]

    def admit(self) -> None:
        """Gives free rows to waiting sequences.

        A prefix that another row has too (the prompt of the same question, or the instructions) is copied from it. If
        that row is yet to be prefilled, the sequence waits for one iteration, until the prefix can be copied.
        """
        for sequence in list(self.waiting):
            if len(self.rows) == len(self.cache.lengths):
                return
            prefix = self._common_prefix(sequence)
            if prefix.length_after_prefill >= LEAST_SHARED and prefix.length_after_prefill > prefix.cached_length:
                continue
            self.waiting.remove(sequence)
            row = len(self.rows)
            self.rows.append(sequence)
            if prefix.cached_length >= LEAST_SHARED:
                self.cache.copy(prefix.row, row, prefix.cached_length)
                sequence.cached = prefix.cached_length
            else:
                self.cache.truncate(row, 0)
            self._swap(row, self.active)
            self.active += 1

    def _common_prefix(self, sequence: Sequence) -> CommonPrefix:
        """Returns the longest prefix that a sequence shares with a row.

        Of equal ones it is that of the last row, so that the order in which rows are compared does not matter.
        """
        prefix_row = 0
        cached_length = 0
        length_after_prefill = 0
        for row, neighbour in self._distinct_rows():
            shared = _shared(sequence, neighbour)
            if neighbour.cached < shared:
                length_after_prefill = max(length_after_prefill, shared)
            length = self.cache.copyable(row, min(shared, neighbour.cached))
            # A longer prefix, or one of equal length in a later row.
            if (length, row) > (cached_length, prefix_row):
                cached_length = length
                prefix_row = row
        return CommonPrefix(prefix_row, cached_length, length_after_prefill)

    def _distinct_rows(self) -> Iterator[tuple[int, Sequence]]:
        """Yields one row of each question, if possible one whose prompt is in the cache.

        If all rows are free, it yields the last sequence, whose tokens row 0 of the cache still has.
        """
        if not self.rows and self.last_released:
            yield 0, self.last_released
        row_of_question: dict[int, int] = {}
        for row, sequence in enumerate(self.rows):
            question = id(sequence.question)
            first_row = row_of_question.get(question)
            if first_row is None or not self.rows[first_row].cached:
                row_of_question[question] = row
        for row in row_of_question.values():
            yield row, self.rows[row]

    def park(self, sequence: Sequence) -> None:
        """Moves a running sequence behind the running rows, to wait for documents."""
        self.active -= 1
        self._swap(self.rows.index(sequence), self.active)

    def unpark(self, sequence: Sequence) -> None:
        """Moves a parked sequence, whose documents have come, back among the running rows."""
        self._swap(self.rows.index(sequence), self.active)
        self.active += 1

    def release(self, sequence: Sequence) -> None:
        """Frees the row of a running sequence."""
        self.park(sequence)  # moves it behind the running rows; the swap moves it to the last row, which is dropped
        self._swap(self.active, len(self.rows) - 1)
        self.last_released = self.rows.pop()

    def truncate(self, row: int, length: int) -> None:
        """Drops what a row of the cache has after its first `length` tokens, and updates its sequence's `cached`."""
        self.cache.truncate(row, length)
        self.rows[row].cached = length

    def discard(self, sequence: Sequence) -> None:
        """Frees the row of a running sequence, and clears it: its keys and values may not be finite.

        The next sequence in the row masks what it has not written, but a mask does not remove a NaN from a sum.
        """
        self.release(sequence)
        self.cache.clear(len(self.rows))
        self.last_released = None

    def _swap(self, i: int, j: int) -> None:
        self.cache.swap(i, j)
        self.rows[i], self.rows[j] = self.rows[j], self.rows[i]


def passes(tokens_of_rows: list[list[int]], limit: int) -> Iterator[list[tuple[int, list[int]]]]:
    """Splits the tokens to prefill of rows 0, 1, ... into passes of at most `limit` tokens: lists of (row, tokens)."""
    parts = []
    free_tokens = limit
    for row, tokens in enumerate(tokens_of_rows):
        while tokens:
            part = tokens[:free_tokens]
            parts.append((row, part))
            tokens = tokens[len(part) :]
            free_tokens -= len(part)
            if not free_tokens:
                yield parts
                parts = []
                free_tokens = limit
    if parts:
        yield parts


def _shared(sequence: Sequence, neighbour: Sequence) -> int:
    """Returns the length of the common prefix of two sequences without the last token of each.

    The last token of `sequence` has to be run, to sample the next one. The last token of `neighbour` is not yet in the
    cache: if it counted, `sequence` could wait for one more token of `neighbour` in each iteration.
    """
    # The usual case, equal prompts of a group, without a comparison in Python; what follows gives the same.
    same_question = sequence.question is neighbour.question
    if same_question and neighbour.tokens[: len(sequence.tokens)] == sequence.tokens:
        return len(sequence.tokens) - 1
    pairs = zip(sequence.tokens[:-1], neighbour.tokens[:-1])
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
