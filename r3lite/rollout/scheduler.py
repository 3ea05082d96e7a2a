"""Which sequence is in which row of the KV cache.

Rows 0 .. active-1 are running; those after them are parked while they wait for documents, so that the model runs on
running rows only. A sequence that ends frees its row for the next waiting one. Runs no model.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from r3lite.models.kv_cache import KVCache
from r3lite.rollout.sequence import Sequence

LEAST_SHARED = 16  # a shorter common prefix is prefilled again rather than copied


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
        room = len(self.cache.lengths) - len(self.rows)
        for sequence in list(self.waiting):
            if not room:
                return
            shared = [(_shared(sequence, other), other.cached, i) for i, other in self._distinct()]
            coming = max((n for n, cached, _ in shared if cached < n), default=0)
            ready, source = max(((min(n, cached), i) for n, cached, i in shared), default=(0, 0))
            if coming >= LEAST_SHARED and coming > ready:
                continue
            self.waiting.remove(sequence)
            room -= 1
            self.rows.append(sequence)
            row = len(self.rows) - 1
            self.cache.lengths[row] = 0
            if ready >= LEAST_SHARED:
                self.cache.copy(source, row, ready)
                sequence.cached = ready
            self._swap(row, self.active)
            self.active += 1

    def _distinct(self) -> Iterator[tuple[int, Sequence]]:
        """One row of each question, if possible one whose prompt is in the cache."""
        if not self.rows and self.last_released:
            yield 0, self.last_released
        best: dict[int, int] = {}
        for i, sequence in enumerate(self.rows):
            key = id(sequence.question)
            if key not in best or not self.rows[best[key]].cached:
                best[key] = i
        yield from ((i, self.rows[i]) for i in best.values())

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
        self.park(sequence)
        self._swap(self.active, len(self.rows) - 1)
        self.last_released = self.rows.pop()

    def discard(self, sequence: Sequence) -> None:
        """Frees the row of a running sequence, and clears it: its keys and values may be no numbers.

        The next sequence in the row masks what it has not written, but a mask does not remove a NaN from a sum.
        """
        self.release(sequence)
        self.cache.clear(len(self.rows))
        self.last_released = None

    def _swap(self, i: int, j: int) -> None:
        self.cache.swap(i, j)
        self.rows[i], self.rows[j] = self.rows[j], self.rows[i]


def passes(pending: list[list[int]], limit: int) -> Iterator[list[tuple[int, list[int]]]]:
    """Splits the tokens to prefill of rows 0, 1, ... into passes of at most `limit` tokens: lists of (row, tokens)."""
    given, room = [], limit
    for row, tokens in enumerate(pending):
        while tokens:
            given.append((row, tokens[:room]))
            room, tokens = room - len(given[-1][1]), tokens[room:]
            if not room:
                yield given
                given, room = [], limit
    if given:
        yield given


def _shared(sequence: Sequence, other: Sequence) -> int:
    """Length of the common prefix of two sequences without the last token of each.

    The last token of `sequence` has to be run, to sample the next one. The last token of `other` is not yet in the
    cache: if it counted, `sequence` could wait for one more token of `other` in each iteration.
    """
    if sequence.question is other.question and other.tokens[: len(sequence.tokens)] == sequence.tokens:
        return len(sequence.tokens) - 1
    pairs = zip(sequence.tokens[:-1], other.tokens[:-1])
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
