"""Which sequences are in which row of the KV cache.

Rows 0 .. active-1 are running. The rows after them are parked: they wait for documents, and the model does not run on
them. Episodes of a question share a row as long as their tokens are equal, so that the model runs once for all of them.
A row without sequences is free for the next waiting sequence. Runs no model.
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
    rows: list[list[Sequence]] = field(default_factory=list)  # by row of the cache; sequences of a row are equal
    active: int = 0  # number of running rows, which come first
    # The sequence whose row was freed last. While no row is in use, row 0 of the cache still holds its tokens.
    last_released: Sequence | None = None

    @property
    def running_rows(self) -> list[list[Sequence]]:
        return self.rows[: self.active]

    @property
    def running(self) -> list[Sequence]:
        """The sequences of the running rows."""
        return list(chain.from_iterable(self.running_rows))

    def admit(self) -> None:
        """Gives waiting sequences a row: a running row with equal tokens, or a free one.

        No more are admitted than the cache has rows, although they may share rows: `split` needs a free row for each
        when they differ.
        """
        limit = len(self.cache.lengths) - sum(len(row) for row in self.rows)
        for sequence in self.waiting[:limit]:
            row = self._equal_row(sequence)
            if row:
                row.append(sequence)
                continue
            free_row = len(self.rows)  # the first one, which `_add` takes
            if self.last_released and free_row == 0:
                # It still has what the last sequence left: we keep what both begin with, such as the prompt.
                common = min(self.cache.lengths[free_row], common_length(sequence, self.last_released))
                self.cache.keep_prefix(free_row, common)
            else:
                self.cache.truncate(free_row, 0)
            self._add([sequence])
        del self.waiting[:limit]

    def _equal_row(self, sequence: Sequence) -> list[Sequence] | None:
        """Returns the running row of other episodes of the question with the same tokens; None if there is none."""
        for row in self.running_rows:
            if row[0].question is sequence.question and row[0].tokens == sequence.tokens:
                return row
        return None

    def _add(self, sequences: list[Sequence]) -> None:
        """Puts sequences into the first free row of the cache.

        The caller has already put the tokens there that the row begins with: a common prefix, or none.
        The row changes places with the first parked row, so that it is the last running one.
        """
        self.rows.append(sequences)
        self._swap(len(self.rows) - 1, self.active)
        self.active += 1

    def split(self) -> None:
        """Divides running rows whose sequences have different tokens by now. Removes drafts that were not accepted."""
        for i, row in enumerate(self.running_rows):  # a copy: rows are added in the loop
            first, *others = equal_parts(row)
            for part in others:
                free = len(self.rows)  # the first free row
                self.cache.copy(i, free, self.cache.lengths[i])
                self._drop_drafts(free, part)
                self._add(part)
            self.rows[i] = first
            self._drop_drafts(i, first)

    def _drop_drafts(self, i: int, row: list[Sequence]) -> None:
        """Cuts row i of the cache to the tokens of its sequences without the last one, which is run next.

        What is cut off are drafts.
        """
        length = len(row[0].tokens) - 1
        if self.cache.lengths[i] > length:
            self.cache.truncate(i, length)

    def park(self, sequence: Sequence) -> None:
        """Moves the row of a running sequence behind the running rows, if all sequences of the row wait for
        documents."""
        i = self._row_of(sequence)
        if all(member.pending for member in self.rows[i]):
            self.active -= 1
            self._swap(i, self.active)

    def unpark(self, sequence: Sequence) -> None:
        """Moves the row of a parked sequence back among the running rows, if no sequence of the row waits any more."""
        i = self._row_of(sequence)
        if not any(member.pending for member in self.rows[i]):
            self._swap(i, self.active)
            self.active += 1

    def release(self, sequence: Sequence) -> None:
        """Takes a sequence out of its row. Frees the row, which must be running, if no other sequence is in it."""
        i = self._row_of(sequence)
        remaining = [member for member in self.rows[i] if member is not sequence]
        if remaining:
            self.rows[i] = remaining
            return
        # The row goes behind the other running rows, and from there behind the parked rows.
        self.active -= 1
        self._swap(i, self.active)
        self._swap(self.active, len(self.rows) - 1)
        self.rows.pop()
        self.last_released = sequence

    def discard(self, sequence: Sequence) -> None:
        """Releases a running sequence whose keys and values may not be finite, and clears the row if that frees it.

        The next sequence in the row masks the slots that are not its own, but 0 times NaN is NaN.
        """
        row_count = len(self.rows)
        self.release(sequence)
        if len(self.rows) < row_count:  # the row was freed, as no other sequence shares it
            self.cache.clear(len(self.rows))
            self.last_released = None

    def _row_of(self, sequence: Sequence) -> int:
        """Returns the index of a sequence's row."""
        for i, row in enumerate(self.rows):
            if any(member is sequence for member in row):
                return i
        raise AssertionError("the sequence has no row")

    def _swap(self, i: int, j: int) -> None:
        self.cache.swap(i, j)
        self.rows[i], self.rows[j] = self.rows[j], self.rows[i]
