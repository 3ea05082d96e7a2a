"""Keys and values of tokens already read: one preallocated block for a batch of sequences.

A token's slot is its position, so a row's slots 0 .. length-1 are exactly what the row has read. Padding of a
ragged append writes beyond a row's length; the next append overwrites it before any query may look there.
"""

import torch
from torch import Tensor


class LayerCache:
    """One layer's view of the cache during one forward pass."""

    def __init__(self, keys: Tensor, values: Tensor, slots: Tensor, used: int):
        self.keys, self.values = keys, values  # [B, K, capacity, D], views of the cache's first B rows
        self.slots, self.used = slots, used  # [B, T], the greatest slot + 1

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Writes k, v [B, K, T, D] at their slots; returns all that may be attended to, [B, K, S, D]."""
        index = self.slots[:, None, :, None].expand_as(k)  # [B, K, T, D]
        self.keys.scatter_(2, index, k.to(self.keys.dtype))
        self.values.scatter_(2, index, v.to(self.values.dtype))
        return self.keys[:, :, : self.used], self.values[:, :, : self.used]


class KVCache:
    """KV cache of `rows` sequences of up to `capacity` tokens, for `num_layers` layers."""

    def __init__(self, num_layers: int, rows: int, kv_heads: int, capacity: int, head_dim: int, dtype, device):
        shape = (num_layers, rows, kv_heads, capacity, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.capacity = capacity

    def begin(self, B: int, T: int) -> tuple[Tensor, Tensor]:
        """Positions [B, T] of T new tokens in the first B rows, and the mask [B, 1, T, S] of what each may see."""
        device = self.lengths.device
        self.slots = self.lengths[:B, None] + torch.arange(T, device=device)  # [B, T]
        self.used = int(self.lengths[:B].max()) + T
        assert self.used <= self.capacity, f"KV cache of {self.capacity} slots asked to hold {self.used}"
        mask = torch.arange(self.used, device=device) <= self.slots[:, None, :, None]  # [B, 1, T, S]
        return self.slots, mask

    def layer(self, i: int) -> LayerCache:
        rows = self.slots.shape[0]
        return LayerCache(self.keys[i, :rows], self.values[i, :rows], self.slots, self.used)

    def end(self, B: int, T: int, lengths: Tensor | None) -> None:
        """Counts the appended tokens: `lengths` [B] of them in each row, or T."""
        self.lengths[:B] += T if lengths is None else lengths

    def swap(self, i: int, j: int) -> None:
        """Exchanges two rows, so that rows still decoding stay at the front and a step costs what they cost."""
        if i != j:
            for block in (self.keys, self.values):
                block[:, [i, j]] = block[:, [j, i]]
            self.lengths[[i, j]] = self.lengths[[j, i]]
