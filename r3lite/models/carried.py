"""What a layer carries from token to token in the rows of a KV cache: the keys and values of all tokens, or a state.

`KVCache` has one `Carried` for each layer. An attention carries `KeysValues`. A short convolution reads only a token
and the few before it, so it carries a `Ring`: the last values of a row, which are overwritten in turn.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from r3lite.models.functions import causal_convolution
from r3lite.settings.rollout import MOST_DRAFTED

# Which prefixes of a row can be copied from a `Ring`: every prefix to which at most SPARE tokens have been added, and
# those of prefilled tokens whose length is a multiple of SAVED_EVERY.
SPARE = 8
SAVED_EVERY = 64


def ring_slots(taps: int) -> int:
    """Returns how many slots, two special ones included, a row has in the `Ring` of a convolution of `taps` tokens."""
    return taps - 1 + MOST_DRAFTED + SPARE + 2


class RowPart(NamedTuple):
    """The part of a prefill that belongs to one row of the cache."""

    row: int
    share: slice  # which of the prefill's N tokens belong to the row
    length: int  # tokens of the row after the prefill

    @property
    def start(self) -> int:
        """How many tokens the row has before the prefill."""
        return self.length - (self.share.stop - self.share.start)


class Carried(Protocol):
    """What one layer carries in all rows of a cache. `length` is always the number of tokens of a row."""

    def reserve(self, capacity: int, rows: int) -> None:
        """Makes room for `capacity` tokens a row. Only the first `rows` rows have tokens; other rows may be cleared."""

    def copyable(self, count: int, length: int, prefilled: int) -> int:
        """Returns the longest prefix of at most `count` tokens that `copy` can take from a row of `length` tokens.

        The row's first `prefilled` tokens were added by prefills. The next one, if any, was decoded.
        """

    def copy(
        self,
        source: int,
        target: int,
        count: int,
        length: int,
    ) -> None:
        """Makes the row `target` hold the first `count` tokens of the row `source`, which has `length` tokens.

        `count` must be `copyable`.
        """

    def swap(self, i: int, j: int, used: int) -> None:
        """Exchanges two rows, which have at most `used` tokens each."""

    def truncate(self, row: int, length: int, old_length: int) -> None:
        """Makes a row of `old_length` tokens end after its first `length` tokens.

        Either at most MOST_DRAFTED tokens are taken back, or all tokens of the row.
        """

    def wipe(self, row: int, length: int) -> None:
        """Sets to zero what is stored behind a row's `length` tokens, if a NaN there could reach a later result."""

    def clear(self, row: int) -> None:
        """Makes a row as it was when nothing had been written to it."""


def exchange(one: Tensor, other: Tensor) -> None:
    """Exchanges the numbers of two tensors.

    `tensor[[i, j]] = tensor[[j, i]]` is shorter, but indices in a list make the host wait for the device.
    """
    copy = one.clone()
    one.copy_(other)
    other.copy_(copy)


def untouched_zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns zeros with the dtype and device of `like`.

    On a CPU they take memory only where numbers are written. So the rows of a cache that no sequence uses take none.
    """
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    size = math.prod(shape) * like.element_size()  # in bytes
    # NumPy gets zeroed memory from the system; PyTorch would write the zeros.
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(like.dtype).view(shape)


class KeysValues:
    """The keys and values of all tokens: `block` [rows, 2 K, capacity, D], keys, then values."""

    def __init__(self, rows: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        self.block = torch.zeros(rows, 2 * kv_heads, 0, head_dim, dtype=dtype, device=device)

    def reserve(self, capacity: int, rows: int) -> None:
        block = self.block
        all_rows, heads, old_capacity, D = block.shape
        # Slots without a token are masked, that is, multiplied by 0. But 0 times a NaN would be a NaN.
        self.block = untouched_zeros(block, (all_rows, heads, capacity, D))
        self.block[:rows, :, :old_capacity] = block[:rows]

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
        """Does nothing: slots behind the tokens are masked until they are overwritten."""

    def wipe(self, row: int, length: int) -> None:
        self.block[row, :, length:] = 0  # a masked NaN would still make the sum over the slots NaN

    def clear(self, row: int) -> None:
        self.block[row] = 0


class RingSlots(NamedTuple):
    """For each of N tokens, the slot of the ring that it is written to, and the slots that its convolution reads."""

    rows: Tensor  # [N]
    written: Tensor  # [N]
    read: Tensor  # [N, taps]: the slots of the taps - 1 tokens before it, then its own


class PrefillSlots(NamedTuple):
    """Where a prefill of N tokens reads and writes a ring. A part is the tokens of one row, see RowPart."""

    shares: list[slice]  # for each part, which of the N tokens it has
    rows: Tensor  # [parts], the row of each part
    before: Tensor  # [parts, taps - 1], the slots of the tokens before each part
    # What is written to `Ring.values`: [3, n], the indices of tokens among the N, and their rows and slots.
    written: Tensor
    # What is written to `Ring.saved`: [4, m], the indices of tokens among the N, and the row, prefix and place of each.
    saved: Tensor


class Ring:
    """The last values of each row, C numbers a token: `values` [rows, size + 2, C].

    The value at a position is in slot (position % size). `size` is large enough to take drafts back, and to copy a
    prefix from a row that is up to SPARE tokens longer. For prefixes whose length is a multiple of SAVED_EVERY,
    prefills also save the last values, so that these prefixes can be copied from a row of any length.
    """

    def __init__(self, rows: int, width: int, taps: int, dtype: torch.dtype, device: torch.device):
        """`width`: C. `taps`: how many tokens the convolution sees: a token itself and those before it."""
        self.taps = taps
        slots = ring_slots(taps)
        self.size = slots - 2
        self.unread = slots - 2  # the slot for rows that only pad a pass: it is written, but never read
        self.empty = slots - 1  # the slot that is never written: the zeros before a row's first token
        self.values = torch.zeros(rows, slots, width, dtype=dtype, device=device)
        # Prefix p is the first (p + 1) SAVED_EVERY tokens of a row: [rows, prefixes, taps - 1, C].
        self.saved = self.values.new_zeros(rows, 0, taps - 1, width)

    def slots_of(
        self,
        rows: Tensor,
        positions: Tensor,
        padding: int | None = None,
    ) -> RingSlots:
        """Returns the slots of tokens at positions [N] in rows [N]; `padding`: the position of tokens that only pad."""
        distances = torch.arange(self.taps - 1, -1, -1, device=positions.device)
        size = torch.full_like(distances, self.size)
        seen_positions = positions[:, None] - distances  # [N, taps]
        read = torch.where(seen_positions < 0, self.empty, seen_positions % size)
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
        """Writes x [N, C] to the ring; returns its causal convolution [N, C] by a weight [C, taps]."""
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
                slot = self.empty
                if position >= 0:
                    slot = position % self.size
                slots_before.append(slot)
            before.append(slots_before)
            offset = part.share.start - part.start  # position + offset is a token's index among the N
            first_written = max(part.start, part.length - self.size)  # later tokens overwrite those before
            for position in range(first_written, part.length):
                written.append((position + offset, part.row, position % self.size))
        device = self.values.device

        def on_device(numbers: list, columns: int) -> Tensor:
            """Returns [columns, n] on the device, for n tuples (or one flat list) of numbers."""
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
        """Returns the tokens of a prefill that go into `saved`: the last taps - 1 of each prefix.

        For each: its index among the N tokens, its row, its prefix, and its place in the prefix's saved values.
        """
        tokens = []
        skipped = SAVED_EVERY - (self.taps - 1)  # tokens in a run of SAVED_EVERY before the first that is saved
        for part in parts:
            offset = part.share.start - part.start
            for position in range(part.start, part.length):
                prefix, place_in_run = divmod(position, SAVED_EVERY)
                if place_in_run >= skipped:
                    tokens.append((position + offset, part.row, prefix, place_in_run - skipped))
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
        tokens, rows, written_slots = slots.written
        self.values[rows, written_slots] = x[tokens]
        tokens, rows, prefixes, places = slots.saved
        self.saved[rows, prefixes, places] = x[tokens]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def reserve(self, capacity: int, rows: int) -> None:
        saved = self.saved
        all_rows, old_prefixes, count, width = saved.shape
        self.saved = untouched_zeros(saved, (all_rows, capacity // SAVED_EVERY, count, width))
        self.saved[:rows, :old_prefixes] = saved[:rows]

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
        if count == 0:
            return
        for place in range(self.taps - 1):
            position = count - (self.taps - 1) + place
            self.values[target, position % self.size] = self.saved[source, prefixes - 1, place]

    def swap(self, i: int, j: int, used: int) -> None:
        exchange(self.values[i], self.values[j])
        prefixes = used // SAVED_EVERY
        exchange(self.saved[i, :prefixes], self.saved[j, :prefixes])

    def truncate(self, row: int, length: int, old_length: int) -> None:
        """Moves nothing: the ring is large enough to have kept the values before the row's new end."""
        assert length == 0 or old_length - length <= MOST_DRAFTED

    def wipe(self, row: int, length: int) -> None:
        """Does nothing: slots behind the tokens are never read before they are overwritten."""

    def clear(self, row: int) -> None:
        self.values[row] = 0
        self.saved[row] = 0
