"""Which episode is in which row of the KV cache.

Rows 0 .. active-1 are at work; those after them wait for documents, so that an iteration costs what the rows at work
cost. An episode that ends frees its row, and the next one takes it. Knows lengths and tokens; runs no model.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from r3lite.models.kv_cache import KVCache
from r3lite.rollout.sequence import Sequence

LEAST_SHARED = 16  # fewer common tokens than this are prefilled again rather than copied


@dataclass
class Scheduler:
    """Assigns sequences to the rows of a cache, in the order in which they came."""

    todo: list[Sequence]
    cache: KVCache
    rows: list[Sequence] = field(default_factory=list)  # rows[i] is in row i of the cache
    active: int = 0
    left: Sequence | None = None  # the last one released: if all rows are free, row 0 still holds it

    @property
    def at_work(self) -> list[Sequence]:
        return self.rows[: self.active]

    def admit(self) -> None:
        """Gives free rows to sequences that have not begun.

        If another row has the same first tokens (the prompt of the same question, or at least the instructions), they
        are copied. If that row is about to be prefilled, the sequence waits until they can be: one iteration.
        """
        room = len(self.cache.lengths) - len(self.rows)
        for sequence in list(self.todo):
            if not room:
                return
            shared = [(_shared(sequence, other), other.cached, i) for i, other in self._distinct()]
            coming = max((n for n, cached, _ in shared if cached < n), default=0)
            ready = max(((min(n, cached), i) for n, cached, i in shared), default=(0, 0))
            if coming >= LEAST_SHARED and coming > ready[0]:
                continue
            self.todo.remove(sequence)
            room -= 1
            self.rows.append(sequence)
            row = len(self.rows) - 1
            self.cache.lengths[row] = 0
            if ready[0] >= LEAST_SHARED:
                self.cache.copy(ready[1], row, ready[0])
                sequence.cached = ready[0]
            self._swap(row, self.active)
            self.active += 1

    def _distinct(self) -> Iterator[tuple[int, Sequence]]:
        """One row for each question, preferably one with its prompt in the cache."""
        if not self.rows and self.left:
            yield 0, self.left
        best: dict[int, int] = {}
        for i, sequence in enumerate(self.rows):
            key = id(sequence.question)
            if key not in best or not self.rows[best[key]].cached:
                best[key] = i
        yield from ((i, self.rows[i]) for i in best.values())

    def park(self, sequence: Sequence) -> None:
        """Takes a sequence from the rows at work, such as one that waits for documents."""
        self.active -= 1
        self._swap(self.rows.index(sequence), self.active)

    def unpark(self, sequence: Sequence) -> None:
        """Puts a sequence whose documents have come back among the rows at work."""
        self._swap(self.rows.index(sequence), self.active)
        self.active += 1

    def release(self, sequence: Sequence) -> None:
        """Frees the row of a finished sequence, which was at work."""
        self.park(sequence)
        self._swap(self.active, len(self.rows) - 1)
        self.left = self.rows.pop()

    def _swap(self, i: int, j: int) -> None:
        self.cache.swap(i, j)
        self.rows[i], self.rows[j] = self.rows[j], self.rows[i]


def passes(pending: list[list[int]], limit: int) -> Iterator[list[tuple[int, list[int]]]]:
    """Rows and the tokens of them that are prefilled together: at most `limit`."""
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
    """Length of the common prefix of two sequences; the last token of each does not count.

    That of `sequence` is run to sample the next one. That of `other` is not in the cache as long as it is the last: a
    sequence that begins as `other` goes on would otherwise wait for it, step by step.
    """
    if sequence.question is other.question and other.tokens[: len(sequence.tokens)] == sequence.tokens:
        return len(sequence.tokens) - 1
    pairs = zip(sequence.tokens[:-1], other.tokens[:-1])
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
