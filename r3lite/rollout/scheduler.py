"""Which sequences are in which row of the KV cache.

The first rows are running. The rows after them are parked: their sequences wait for documents, and the model does not
run on them. The rows after these are free. Episodes of a question share a row as long as their tokens are equal, so
that the model runs once for all of them. This file moves rows of the cache, but runs no model.
"""

from dataclasses import dataclass, field
from itertools import chain

from r3lite.models.kv_cache import KVCache
from r3lite.rollout.prefixes import common_length, equal_parts
from r3lite.rollout.sequence import Sequence


@dataclass
class Scheduler:
    """Assigns sequences to the rows of a cache, first come, first served."""

    waiting: list[Sequence]  # sequences that have no row yet
    cache: KVCache
    # The sequences of each running or parked row of the cache. `split` ensures that those of a running row have equal
    # tokens.
    rows: list[list[Sequence]] = field(default_factory=list)
    running_count: int = 0  # number of running rows
    # The sequence whose row was freed last. While all rows are free, row 0 of the cache still holds its tokens.
    last_released: Sequence | None = None

    @property
    def running_rows(self) -> list[list[Sequence]]:
        return self.rows[: self.running_count]

    @property
    def running(self) -> list[Sequence]:
        """The sequences of the running rows."""
        return list(chain.from_iterable(self.running_rows))

    def admit(self) -> None:
        """Gives waiting sequences a row: a running row with equal tokens, or a free one.

        The cache never has more sequences than rows, even where sequences share a row: `split` needs a row for each as
        soon as their tokens differ.
        """
        limit = len(self.cache.lengths) - sum(len(row) for row in self.rows)
        for sequence in self.waiting[:limit]:
            row = self._equal_row(sequence)
            if row:
                row.append(sequence)
                continue
            free_row = len(self.rows)  # index of the first free row, into which `_add` puts the sequence
            if self.last_released and free_row == 0:
                # Row 0 still holds the tokens of `last_released`. Of the prefix that both sequences have in common,
                # such as the prompt, we keep as much as the layers can: a state cannot be cut at every token.
                common = min(self.cache.lengths[free_row], common_length(sequence, self.last_released))
                self.cache.keep_prefix(free_row, common)
            else:
                self.cache.truncate(free_row, 0)
            self._add([sequence])
        del self.waiting[:limit]

    def _equal_row(self, sequence: Sequence) -> list[Sequence] | None:
        """Returns the running row whose sequences have the same question and tokens; None if there is none."""
        for row in self.running_rows:
            if row[0].question is sequence.question and row[0].tokens == sequence.tokens:
                return row
        return None

    def _add(self, sequences: list[Sequence]) -> None:
        """Makes the first free row of the cache a running row with these sequences.

        The caller has already put a prefix of their tokens, perhaps an empty one, into this row of the cache. The row
        is exchanged with the first parked row, so that it becomes the last running one.
        """
        self.rows.append(sequences)
        self._swap(len(self.rows) - 1, self.running_count)
        self.running_count += 1

    def split(self) -> None:
        """Divides running rows whose sequences have different tokens by now. Removes drafts that were not accepted."""
        for i, row in enumerate(self.running_rows):  # a copy of the list, because `_add` adds rows
            first, *others = equal_parts(row)
            for part in others:
                free_row = len(self.rows)
                self.cache.copy(i, free_row, self.cache.lengths[i])
                self._drop_drafts(free_row, part)
                self._add(part)
            self.rows[i] = first
            self._drop_drafts(i, first)

    def _drop_drafts(self, i: int, row: list[Sequence]) -> None:
        """Cuts row i of the cache to the tokens of `row`'s sequences without their last one, which is run next.

        What this removes are drafts that were not accepted.
        """
        length = len(row[0].tokens) - 1
        if self.cache.lengths[i] > length:
            self.cache.truncate(i, length)

    def park(self, sequence: Sequence) -> None:
        """Parks the row of a running sequence, if all sequences of the row wait for documents.

        It is called for one sequence of a row after another: the call for the last one parks the row.
        """
        i = self._row_of(sequence)
        if all(member.pending for member in self.rows[i]):
            self.running_count -= 1
            self._swap(i, self.running_count)

    def unpark(self, sequence: Sequence) -> None:
        """Makes the parked row of a sequence run again, if no sequence of the row waits for documents any more.

        Like `park`, it is called for one sequence after another.
        """
        i = self._row_of(sequence)
        if not any(member.pending for member in self.rows[i]):
            self._swap(i, self.running_count)
            self.running_count += 1

    def release(self, sequence: Sequence) -> None:
        """Takes a sequence out of its row. Frees the row, which must be running, if no other sequence is in it."""
        i = self._row_of(sequence)
        remaining = [member for member in self.rows[i] if member is not sequence]
        if remaining:
            self.rows[i] = remaining
            return
        # The row is moved behind the other running rows, and from there behind the parked rows.
        self.running_count -= 1
        self._swap(i, self.running_count)
        self._swap(self.running_count, len(self.rows) - 1)
        self.rows.pop()
        self.last_released = sequence

    def discard(self, sequence: Sequence) -> None:
        """Releases a running sequence whose keys and values may not be finite, and clears the row if that frees it.

        Without this, the next sequence in the row could get NaNs: it attends to old slots with a weight of 0, but 0
        times NaN is NaN.
        """
        row_count = len(self.rows)
        self.release(sequence)
        if len(self.rows) < row_count:  # the row was freed, as no other sequence shared it
            self.cache.clear(len(self.rows))  # `release` made it the first free row
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
