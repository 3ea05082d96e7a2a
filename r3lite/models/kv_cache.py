"""The KV cache of a batch of sequences, and the attention contexts of the two kinds of pass that fill it.

A token's slot is its position, so a row's slots 0 .. length-1 hold the keys and values of all its tokens so far. A
`Prefill` gives rows many tokens each, a `Decode` one each.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from r3lite.models.attention import ALIGNMENT, causal_masks, grouped_attention
from r3lite.models.causal_lm import CausalLM

BLOCK = 128  # slots are added in blocks, so that growing is rare and wastes little


class Prefill:
    """Tokens given to several rows of a cache, laid end to end so that none is padded; a pass's attention context.

    The rows' lengths count them from now on; the pass writes their keys and values.
    """

    def __init__(self, cache: "KVCache", given: Sequence[tuple[int, list[int]]]):
        """`given`: rows, and the tokens that each row is given after those that it has."""
        self.cache, device = cache, cache.device
        starts = [cache.lengths[row] for row, _ in given]
        tokens = [[t for _, tokens in given for t in tokens]]
        self.tokens = torch.tensor(tokens)  # [1, N], on the host
        positions = [start + i for start, (_, tokens) in zip(starts, given) for i in range(len(tokens))]
        self.positions = torch.tensor([positions]).to(device, non_blocking=True)  # [1, N]
        stretches = [(start, len(tokens)) for start, (_, tokens) in zip(starts, given)]
        cache.reserve(max(start + T for start, T in stretches))
        masks = causal_masks(stretches, device, cache.dtype)
        self.parts: list[tuple[int, slice, int, Tensor | None]] = []  # row, its share of the N, its slots, its mask
        first = 0
        for (row, _), (start, T), mask in zip(given, stretches, masks):
            self.parts.append((row, slice(first, first + T), start + T, mask))
            cache.lengths[row] = start + T
            first += T

    def attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """See AttentionContext: q [1, H, N, D], kv [1, 2 K, N, D] -> [1, N, H D]. Writes kv to the cache."""
        parts = []
        for row, own, used, mask in self.parts:
            cached = self.cache.blocks[layer][row : row + 1, :, :used]  # [1, 2 K, S, D], a view
            cached[:, :, own.start - own.stop :] = kv[:, :, own]
            parts.append(grouped_attention(q[:, :, own], cached, mask))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class Decode:
    """One more token in each of the first B rows of a cache, of whose slots the first `used` may be attended to.

    The attention context of a pass over ids [B, 1].
    """

    def __init__(self, cache: "KVCache", positions: Tensor, used: int):
        self.cache, self.positions = cache, positions  # [B, 1]
        self.rows = cache.counting[: len(positions), None]  # [B, 1]
        later = cache.counting[: used + -used % ALIGNMENT] > positions[:, None, :, None]  # rows of the mask are aligned
        self.mask = torch.where(later, cache.hidden, cache.seen)[..., :used]  # [B, 1, 1, S]

    def attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """See AttentionContext: q [B, H, 1, D], kv [B, 2 K, 1, D] -> [B, 1, H D]. Writes kv to the cache."""
        B, K2, _, D = kv.shape
        cached = self.cache.blocks[layer][:B]
        # Not scatter_: with an expanded index it takes 1.4 ms on a CPU where this takes 7 us (64 rows, one token each).
        cached[self.rows, :, self.positions] = kv.transpose(1, 2).to(cached.dtype)  # [B, 1, 2 K, D]
        k, v = cached[:, :, : self.mask.shape[-1]].chunk(2, dim=1)  # [B, K, S, D]
        # The queries that share a key head are laid end to end, so that the cache is never copied.
        q = q.reshape(B, K2 // 2, -1, D)  # [B, K, H / K, D]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask).reshape(B, 1, -1)


class KVCache:
    """KV cache of `rows` sequences for `num_layers` layers; its capacity grows as tokens are added."""

    def __init__(
        self, num_layers: int, rows: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ):
        self.dtype, self.device = dtype, device
        empty = torch.zeros(rows, 2 * kv_heads, 0, head_dim, dtype=dtype, device=device)
        self.blocks = [empty] * num_layers  # each [rows, 2 K, capacity, D]: keys, then values
        self.lengths = [0] * rows  # on the host: reading them from the device would wait for it
        # What each step of decoding would make anew: 0, 1, 2 .. for all rows and slots, and what a mask consists of.
        self.counting = torch.arange(rows, device=device)
        self.hidden, self.seen = torch.tensor([-math.inf, 0.0], dtype=dtype).to(device, non_blocking=True)

    @staticmethod
    def of(model: CausalLM, rows: int) -> "KVCache":
        """An empty cache for `rows` sequences of a model, in its dtype and on its device."""
        c, weight = model.config, model.head_weight
        return KVCache(c.num_hidden_layers, rows, c.num_key_value_heads, c.head_dim, weight.dtype, weight.device)

    def reserve(self, slots: int) -> None:
        """Makes room for `slots` tokens a row, one layer at a time so that only one is ever held twice."""
        more = -(-slots // BLOCK) * BLOCK - self.blocks[0].shape[2]
        if more > 0:
            for i, block in enumerate(self.blocks):
                rows, heads, used, D = block.shape
                # Not F.pad: that fills all of the new block before it copies the old one.
                self.blocks[i] = block.new_empty(rows, heads, used + more, D)
                self.blocks[i][:, :, :used] = block
                self.blocks[i][:, :, used:] = 0  # masked, but 0 times what memory held before may be no number
            capacity = self.blocks[0].shape[2]
            self.counting = torch.arange(max(len(self.lengths), capacity), device=self.device)

    def decode(self, rows: int) -> Decode:
        """The context of one more token in each of the first `rows` rows, whose lengths count it from now on."""
        positions = self.lengths[:rows]
        used = max(positions) + 1
        self.reserve(used)
        self.lengths[:rows] = [position + 1 for position in positions]
        return Decode(self, torch.tensor(positions).to(self.device, non_blocking=True)[:, None], used)

    def copy(self, source: int, target: int, count: int) -> None:
        """Makes the row `target` hold the first `count` tokens of the row `source`."""
        for block in self.blocks:
            block[target, :, :count] = block[source, :, :count]
        self.lengths[target] = count

    def clear(self, row: int) -> None:
        """Makes a row as it was when nothing had been written to it."""
        for block in self.blocks:
            block[row] = 0
        self.lengths[row] = 0

    def swap(self, i: int, j: int) -> None:
        """Exchanges two rows."""
        if i != j:
            used = max(self.lengths[i], self.lengths[j])
            for block in self.blocks:
                block[[i, j], :, :used] = block[[j, i], :, :used]
            self.lengths[i], self.lengths[j] = self.lengths[j], self.lengths[i]
