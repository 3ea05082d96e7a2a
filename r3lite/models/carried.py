"""What a layer carries from token to token in the rows of a KV cache: the keys and values of all tokens, or a state.

`KVCache` has one `Carried` for each layer. An attention carries `KeysValues`. A short convolution reads only the few
tokens before each, so it carries a `Ring`: the last values of a row, which are overwritten in turn.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from r3lite.models.functions import causal_convolution
from r3lite.settings.rollout import MOST_DRAFTED

SPARE = 8  # tokens: a prefix that at most so many tokens of its row follow can be copied whole, wherever it ends
SAVED_EVERY = 64  # tokens: of any other prefix a multiple of so many can be copied


def ring_slots(taps: int) -> int:
    """Returns the slots of a row in the `Ring` of a convolution that sees `taps` tokens."""
    return taps - 1 + MOST_DRAFTED + SPARE + 2


class RowPart(NamedTuple):
    """The part of a prefill that belongs to one row of the cache."""

    row: int
    share: slice  # of the prefill's N tokens
    length: int  # of the row, with these tokens

    @property
    def start(self) -> int:
        """The row's tokens before these."""
        return self.length - (self.share.stop - self.share.start)


class Carried(Protocol):
    """What one layer carries, of all rows of a cache. `length` is how many tokens a row has in the cache."""

    def reserve(self, capacity: int) -> None:
        """Makes room for `capacity` tokens a row."""

    def copyable(self, count: int, length: int, prefilled: int) -> int:
        """Returns the longest prefix of at most `count` tokens that `copy` can take from a row of `length` tokens.

        The first `prefilled` of these were given to the row by prefills; those after them were decoded, or given later.
        """

    def copy(
        self,
        source: int,
        target: int,
        count: int,
        length: int,
    ) -> None:
        """Makes the row `target` hold the first `count` tokens, which are `copyable`, of the row `source`."""

    def swap(self, i: int, j: int, used: int) -> None:
        """Exchanges two rows, of at most `used` tokens."""

    def truncate(self, row: int, length: int, old_length: int) -> None:
        """Makes a row end after its first `length` tokens, of `old_length`.

        Either at most MOST_DRAFTED tokens are taken back, or all of the row.
        """

    def wipe(self, row: int, length: int) -> None:
        """Overwrites those numbers behind a row's tokens that may be multiplied before they are overwritten."""

    def clear(self, row: int) -> None:
        """Makes a row as it was when nothing had been written to it."""


def exchange(one: Tensor, other: Tensor) -> None:
    """Exchanges the numbers of two tensors. Indexing by a list of rows instead would make the host wait for a card."""
    numbers = one.clone()
    one.copy_(other)
    other.copy_(numbers)


class KeysValues:
    """The keys and values of all tokens: `block` [rows, 2 K, capacity, D], keys, then values."""

    def __init__(self, rows: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        self.block = torch.zeros(rows, 2 * kv_heads, 0, head_dim, dtype=dtype, device=device)

    def reserve(self, capacity: int) -> None:
        block = self.block
        rows, heads, old_capacity, D = block.shape
        # Not F.pad: that fills all of the new block before it copies the old one.
        self.block = block.new_empty(rows, heads, capacity, D)
        self.block[:, :, :old_capacity] = block
        self.block[:, :, old_capacity:] = 0  # masked, but 0 times what memory held before may be no number

    def copyable(self, count: int, length: int, prefilled: int) -> int:
        return count

    def copy(
        self,
        source: int,
        target: int,
        count: int,
        length: int,
    ) -> None:
        self.block[target, :, :count] = self.block[source, :, :count]

    def swap(self, i: int, j: int, used: int) -> None:
        exchange(self.block[i, :, :used], self.block[j, :, :used])

    def truncate(self, row: int, length: int, old_length: int) -> None:
        """Does nothing: what is behind the tokens is masked until it is overwritten."""

    def wipe(self, row: int, length: int) -> None:
        self.block[row, :, length:] = 0  # a mask does not remove a NaN from a sum

    def clear(self, row: int) -> None:
        self.block[row] = 0


class RingSlots(NamedTuple):
    """The slots of a ring to which N tokens, one or several of a row, are written, and the slots that each reads."""

    rows: Tensor  # [N]
    written: Tensor  # [N]
    read: Tensor  # [N, taps]: the slots of the tokens before each, then its own


class PrefillSlots(NamedTuple):
    """The slots of a ring for the tokens of a prefill and the tokens before them, and the places of saved values."""

    shares: list[slice]  # of the N tokens, by parts
    rows: Tensor  # [parts]
    before: Tensor  # [parts, taps - 1]
    written: Tensor  # [3, n]: tokens, rows and slots
    saved: Tensor  # [4, m]: tokens, rows, prefixes and places


class Ring:
    """The last values of each row, C numbers a token: `values` [rows, size + 2, C].

    The value at a position is in the slot position modulo `size`. The size lets drafts be taken back, and a prefix be
    copied from a row that is up to SPARE tokens longer. Of prefixes that are a multiple of SAVED_EVERY long, prefills
    also save the last values, so that they can be copied from a row of any length.
    """

    def __init__(self, rows: int, width: int, taps: int, dtype: torch.dtype, device: torch.device):
        """`taps`: how many tokens a convolution sees from a token, which is one of them."""
        self.taps = taps
        slots = ring_slots(taps)
        self.size = slots - 2
        self.unread = slots - 2  # the slot for rows that only pad a pass: it is written, but never read
        self.empty = slots - 1  # the slot that is never written: the zeros before a row's first token
        self.values = torch.zeros(rows, slots, width, dtype=dtype, device=device)
        self.saved = self.values.new_zeros(rows, 0, taps - 1, width)  # [rows, prefixes, taps - 1, C]

    def slots_of(
        self,
        rows: Tensor,
        positions: Tensor,
        padding: int | None = None,
    ) -> RingSlots:
        """Returns the slots of tokens at positions [N] in rows [N]; `padding`: the position of rows that only pad."""
        back = torch.arange(self.taps - 1, -1, -1, device=positions.device)
        size = torch.full_like(back, self.size)
        seen = positions[:, None] - back  # [N, taps]
        read = torch.where(seen < 0, self.empty, seen % size)
        written = read[:, -1]
        if padding is not None:
            written = torch.where(positions == padding, self.unread, written)
        return RingSlots(rows, written, read)

    def convolve(
        self,
        x: Tensor,
        weight: Tensor,
        slots: RingSlots | PrefillSlots,
    ) -> Tensor:
        """Writes x [N, C]; returns its causal convolution [N, C] by a weight [C, taps]."""
        if isinstance(slots, PrefillSlots):
            return self._convolve_prefill(x, weight, slots)
        self.values[slots.rows, slots.written] = x.to(self.values.dtype)
        latest = self.values[slots.rows[:, None], slots.read]  # [N, taps, C]
        return causal_convolution(latest.to(x.dtype), weight)[:, 0]

    def prefill_slots(self, parts: Sequence[RowPart]) -> PrefillSlots:
        """Returns the slots of the tokens of a prefill."""
        before = []
        written = []
        for part in parts:
            slots_before = []
            for position in range(part.start - self.taps + 1, part.start):
                slots_before.append(position % self.size if position >= 0 else self.empty)
            before.append(slots_before)
            offset = part.share.start - part.start  # from a position to a token's number
            for position in range(max(part.start, part.length - self.size), part.length):
                written.append((position + offset, part.row, position % self.size))
        device = self.values.device

        def on_device(numbers: list, columns: int) -> Tensor:
            tensor = torch.tensor(numbers, dtype=torch.long).view(-1, columns).t()
            return tensor.to(device, non_blocking=True)

        return PrefillSlots(
            shares=[part.share for part in parts],
            rows=on_device([part.row for part in parts], 1)[0],
            before=on_device(before, self.taps - 1).t(),
            written=on_device(written, 3),
            saved=on_device(self._saved_tokens(parts), 4),
        )

    def _saved_tokens(self, parts: Sequence[RowPart]) -> list[tuple[int, int, int, int]]:
        """Returns which tokens of a prefill are saved beside the ring: their numbers, rows, prefixes and places."""
        tokens = []
        last = SAVED_EVERY - (self.taps - 1)  # the first place, a position modulo SAVED_EVERY, that is saved
        for part in parts:
            offset = part.share.start - part.start
            for position in range(part.start, part.length):
                prefix, place = divmod(position, SAVED_EVERY)
                if place >= last:
                    tokens.append((position + offset, part.row, prefix, place - last))
        return tokens

    def _convolve_prefill(
        self,
        x: Tensor,
        weight: Tensor,
        slots: PrefillSlots,
    ) -> Tensor:
        before = self.values[slots.rows[:, None], slots.before].to(x.dtype)  # [parts, taps - 1, C]
        outputs = []
        for share, values in zip(slots.shares, before, strict=True):
            outputs.append(causal_convolution(torch.cat((values, x[share])), weight))
        x = x.to(self.values.dtype)
        tokens, rows, written = slots.written
        self.values[rows, written] = x[tokens]
        tokens, rows, prefixes, places = slots.saved
        self.saved[rows, prefixes, places] = x[tokens]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def reserve(self, capacity: int) -> None:
        saved = self.saved
        rows, old_prefixes, count, width = saved.shape
        self.saved = saved.new_zeros(rows, capacity // SAVED_EVERY, count, width)
        self.saved[:, :old_prefixes] = saved

    def copyable(self, count: int, length: int, prefilled: int) -> int:
        if length - count <= SPARE:
            return count
        return min(count, prefilled) // SAVED_EVERY * SAVED_EVERY

    def copy(
        self,
        source: int,
        target: int,
        count: int,
        length: int,
    ) -> None:
        prefixes = count // SAVED_EVERY
        self.saved[target, :prefixes] = self.saved[source, :prefixes]
        if length - count <= SPARE:
            self.values[target] = self.values[source]
            return
        assert count % SAVED_EVERY == 0, "this prefix is not copyable"
        for place in range(self.taps - 1 if count else 0):
            position = count - self.taps + 1 + place
            self.values[target, position % self.size] = self.saved[source, prefixes - 1, place]

    def swap(self, i: int, j: int, used: int) -> None:
        exchange(self.values[i], self.values[j])
        prefixes = used // SAVED_EVERY
        exchange(self.saved[i, :prefixes], self.saved[j, :prefixes])

    def truncate(self, row: int, length: int, old_length: int) -> None:
        """Moves nothing: the ring is large enough to have kept the values before the row's new end."""
        assert length == 0 or old_length - length <= MOST_DRAFTED

    def wipe(self, row: int, length: int) -> None:
        """Does nothing: what is behind the tokens is never read before it is overwritten."""

    def clear(self, row: int) -> None:
        self.values[row] = 0
        self.saved[row] = 0
