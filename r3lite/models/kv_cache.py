"""Keys and values of tokens already read, for a batch of sequences.

A token's slot is its position, so a row's slots 0 .. length-1 are exactly what the row has read. Tokens are given to
rows in a `Reading`, many to each, and added in a `Step`, one to each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from r3lite.models.packing import causal_masks

BLOCK = 128  # slots are added in blocks, so that growing is rare and wastes little


@dataclass(frozen=True)
class LayerCache:
    """One layer's view of the cache in a `Step`."""

    keys: Tensor  # [B, K, capacity, D], views of B rows of the cache
    values: Tensor
    slots: Tensor  # [B, 1]
    mask: Tensor  # [B, 1, 1, S], added to scores

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Writes k, v [B, K, 1, D] at their slots; returns all that may be attended to, [B, K, S, D]."""
        # Not scatter_: with an expanded index it takes 1.4 ms on a CPU where this takes 7 us (64 rows, one token each).
        rows, used = torch.arange(len(k), device=k.device)[:, None], self.mask.shape[-1]  # [B, 1]
        self.keys[rows, :, self.slots] = k.transpose(1, 2).to(self.keys.dtype)  # [B, 1, K, D]
        self.values[rows, :, self.slots] = v.transpose(1, 2).to(self.values.dtype)
        return self.keys[:, :, :used], self.values[:, :, :used]


class Step:
    """One more token in each of the first B rows of a cache, of whose slots the first `used` may be attended to."""

    def __init__(self, cache: "KVCache", positions: Tensor, used: int):
        self.cache, self.positions = cache, positions  # [B, 1]
        later = torch.arange(used, device=positions.device) > positions[:, None, :, None]  # [B, 1, 1, S]
        zeros = torch.zeros(later.shape, dtype=cache.keys[0].dtype, device=positions.device)
        self.mask = zeros.masked_fill_(later, float("-inf"))

    def seen(self, i: int) -> LayerCache:
        """What layer i needs."""
        rows = slice(0, len(self.positions))
        return LayerCache(self.cache.keys[i][rows], self.cache.values[i][rows], self.positions, self.mask)

    def end(self) -> None:
        """Counts the tokens."""
        for row in range(len(self.positions)):
            self.cache.lengths[row] += 1


@dataclass(frozen=True)
class Piece:
    """What one row is given in a pass that reads for several, in one layer."""

    own: slice  # of the pass's tokens
    mask: Tensor | None  # [T, S], added to scores; None: causal, the row is empty
    keys: Tensor  # [1, K, S, D], the row's, with slots for what is given
    values: Tensor

    def gather(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Writes its share of the pass's k, v [1, K, N, D]; returns all that may be attended to, [1, K, S, D]."""
        T = self.own.stop - self.own.start
        self.keys[:, :, -T:], self.values[:, :, -T:] = k[:, :, self.own], v[:, :, self.own]
        return self.keys, self.values


class Reading:
    """Tokens given to several rows of a cache, laid end to end so that none is padded."""

    def __init__(self, cache: "KVCache", given: Sequence[tuple[int, list[int]]]):
        """`given`: rows and the tokens that each is to read after what it has read."""
        self.cache, self.given, device = cache, given, cache.device
        starts = [cache.lengths[row] for row, _ in given]
        self.tokens = torch.tensor([[t for _, tokens in given for t in tokens]], device=device)  # [1, N]
        positions = [start + i for start, (_, tokens) in zip(starts, given) for i in range(len(tokens))]
        self.positions = torch.tensor([positions], device=device)  # [1, N]
        stretches = [(start, len(tokens)) for start, (_, tokens) in zip(starts, given)]
        cache.reserve(max(start + T for start, T in stretches))
        masks = causal_masks(stretches, device, cache.keys[0].dtype)
        self.parts, first = [], 0
        for (row, _), (start, T), mask in zip(given, stretches, masks):
            self.parts.append((slice(first, first + T), mask, row, start + T))
            first += T

    def seen(self, i: int) -> list[Piece]:
        """What layer i needs."""
        keys, values = self.cache.keys[i], self.cache.values[i]
        return [
            Piece(own, mask, keys[row : row + 1, :, :used], values[row : row + 1, :, :used])
            for own, mask, row, used in self.parts
        ]

    def end(self) -> None:
        """Counts the tokens that were read."""
        for row, tokens in self.given:
            self.cache.lengths[row] += len(tokens)


class KVCache:
    """KV cache of `rows` sequences for `num_layers` layers; its capacity grows with what is appended."""

    def __init__(
        self, num_layers: int, rows: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ):
        empty = torch.zeros(rows, kv_heads, 0, head_dim, dtype=dtype, device=device)
        self.keys = [empty] * num_layers  # each [rows, K, capacity, D]
        self.values = [empty] * num_layers
        self.lengths = [0] * rows  # known to the host, which so never waits for the device to tell it

    @property
    def device(self) -> torch.device:
        return self.keys[0].device

    def reserve(self, slots: int) -> None:
        """Makes room for `slots` tokens a row, one layer at a time so that only one is ever held twice."""
        more = -(-slots // BLOCK) * BLOCK - self.keys[0].shape[2]
        if more > 0:
            for blocks in (self.keys, self.values):
                for i, block in enumerate(blocks):
                    blocks[i] = F.pad(block, (0, 0, 0, more))

    def step(self, rows: int) -> Step:
        """One more token in each of the first `rows` rows."""
        lengths = self.lengths[:rows]
        used = max(lengths) + 1
        self.reserve(used)
        return Step(self, torch.tensor(lengths, device=self.device)[:, None], used)

    def copy(self, source: int, target: int, count: int) -> None:
        """Makes the row `target` hold the first `count` tokens of the row `source`."""
        for block in (*self.keys, *self.values):
            block[target, :, :count] = block[source, :, :count]
        self.lengths[target] = count

    def swap(self, i: int, j: int) -> None:
        """Exchanges two rows."""
        if i != j:
            used = max(self.lengths[i], self.lengths[j])
            for block in (*self.keys, *self.values):
                block[[i, j], :, :used] = block[[j, i], :, :used]
            self.lengths[i], self.lengths[j] = self.lengths[j], self.lengths[i]
