"""Which sequences are in which row of the KV cache.

Rows 0 .. active-1 are running; those after them are parked while they wait for documents, so that the model runs on
running rows only. Sequences whose tokens are equal share a row, so that the model runs once for all of them: episodes
of a question, until they differ. One that ends frees a row for the next waiting one. Runs no model.
"""

from dataclasses import dataclass, field
from itertools import chain

from r3lite.models.kv_cache import KVCache
from r3lite.rollout.prefixes import common_length, equal_parts
from r3lite.rollout.sequence import Sequence


@dataclass
class Scheduler:
    """Assigns sequences to the rows of a cache, first come, first served."""

    waiting: list[Sequence]  # without a row
    cache: KVCache
    rows: list[list[Sequence]] = field(default_factory=list)  # by row of the cache; the tokens of a row's are equal
    active: int = 0  # number of running rows, which come first
    last_released: Sequence | None = None  # if all rows are free, row 0 of the cache still has its tokens

    @property
    def running_rows(self) -> list[list[Sequence]]:
        return self.rows[: self.active]

    @property
    def running(self) -> list[Sequence]:
        """The sequences of the running rows."""
        return list(chain.from_iterable(self.running_rows))

    def admit(self) -> None:
        """Gives waiting sequences a row: a running one that has their tokens, or a free one.

        There are never more sequences than rows, so that each can have a row of its own when they differ.
        """
        free = len(self.cache.lengths) - sum(len(row) for row in self.rows)
        for sequence in self.waiting[:free]:
            row = self._equal_row(sequence)
            if row:
                row.append(sequence)
                continue
            if self.last_released and not self.rows:
                common = min(self.cache.lengths[0], common_length(sequence, self.last_released))
                self.cache.copy(0, 0, self.cache.copyable(0, common))
            else:
                self.cache.truncate(len(self.rows), 0)
            self._add([sequence])
        del self.waiting[:free]

    def _equal_row(self, sequence: Sequence) -> list[Sequence]:
        """Returns the running row of another episode of the question that has the same tokens; [] if there is none."""
        for row in self.running_rows:
            if row[0].question is sequence.question and row[0].tokens == sequence.tokens:
                return row
        return []

    def _add(self, row: list[Sequence]) -> None:
        """Makes the first free row of the cache a running one."""
        self.rows.append(row)
        self._swap(len(self.rows) - 1, self.active)
        self.active += 1

    def split(self) -> None:
        """Gives sequences of a running row whose tokens are not equal any more rows of their own.

        What a row of the cache has beyond the last but one of its tokens are drafts that were not accepted: they go.
        """
        for i, row in enumerate(self.running_rows):
            first, *others = equal_parts(row)
            for part in others:
                copied = len(self.rows)
                self.cache.copy(i, copied, self.cache.lengths[i])
                self._drop_drafts(copied, part)
                self._add(part)
            self.rows[i] = first
            self._drop_drafts(i, first)

    def _drop_drafts(self, i: int, row: list[Sequence]) -> None:
        """Ends row i of the cache before the last token of its sequences, which is yet to be run."""
        length = len(row[0].tokens) - 1
        if self.cache.lengths[i] > length:
            self.cache.truncate(i, length)

    def park(self, sequence: Sequence) -> None:
        """Moves the row of a running sequence behind the running rows, once all its sequences wait for documents."""
        i = self._place(sequence)
        if all(member.pending for member in self.rows[i]):
            self.active -= 1
            self._swap(i, self.active)

    def unpark(self, sequence: Sequence) -> None:
        """Moves the row of a parked sequence back among the running rows, once its sequences have their documents."""
        i = self._place(sequence)
        if not any(member.pending for member in self.rows[i]):
            self._swap(i, self.active)
            self.active += 1

    def release(self, sequence: Sequence) -> None:
        """Takes a sequence out of its row, and frees the row, which must be running, if it has no other."""
        i = self._place(sequence)
        remaining = [member for member in self.rows[i] if member is not sequence]
        if remaining:
            self.rows[i] = remaining
            return
        self.active -= 1
        self._swap(i, self.active)
        self._swap(self.active, len(self.rows) - 1)  # the last row, which is dropped
        self.rows.pop()
        self.last_released = sequence

    def discard(self, sequence: Sequence) -> None:
        """Releases a running sequence whose keys and values may not be finite, and clears the row if that frees it.

        The next sequence in the row masks what it has not written, but a mask does not remove a NaN from a sum.
        """
        row_count = len(self.rows)
        self.release(sequence)
        if len(self.rows) < row_count:  # the row was freed, as no other sequence shares it
            self.cache.clear(len(self.rows))
            self.last_released = None

    def _place(self, sequence: Sequence) -> int:
        """Returns the row of a sequence."""
        for i, row in enumerate(self.rows):
            if any(member is sequence for member in row):
                return i
        raise AssertionError("the sequence has no row")

    def _swap(self, i: int, j: int) -> None:
        self.cache.swap(i, j)
        self.rows[i], self.rows[j] = self.rows[j], self.rows[i]
