"""The attention context of a pass over drafts: several more tokens in each of the first rows of a KV cache.

A `Decode` adds one token to each row, a `Prefill` adds many. Here each row gets a few tokens, and the number differs
from row to row. Linear layers see the tokens laid end to end, without padding; attention sees all rows, padded.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from r3lite.models.carried import Ring, RingSlots
from r3lite.models.delta_rows import RowTokens
from r3lite.models.kv_cache import CachePass, KVCache


class Verification(CachePass):
    """N tokens laid end to end, some for each of the rows 0 .. B-1 of a cache; the context of a pass over ids [1, N].

    The constructor adds the tokens to the lengths of the cache's rows. `KVCache.truncate` takes back those that are not
    confirmed.
    """

    drafts = True

    def __init__(self, cache: KVCache, additions: Sequence[Sequence[int]]):
        """`additions`: the tokens that are added to each row, at least one."""
        super().__init__(cache)
        self.row_count = len(additions)
        counts = [len(tokens) for tokens in additions]
        self.longest = max(counts)  # T
        starts = cache.lengths[: self.row_count]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        self.used = max(ends)  # S
        cache.reserve(self.used)
        cache.lengths[: self.row_count] = ends
        tokens: list[int] = []
        rows: list[int] = []
        positions: list[int] = []
        # For each row, the places of its tokens among the N, padded to T with the place of its first token.
        padded: list[list[int]] = []
        for row, (start, addition) in enumerate(zip(starts, additions, strict=True)):
            first = len(tokens)
            last = first + len(addition)
            tokens.extend(addition)
            rows.extend([row] * len(addition))
            positions.extend(range(start, start + len(addition)))
            padding = self.longest - len(addition)
            padded.append([*range(first, last)] + [first] * padding)
        self.tokens = torch.tensor([tokens])  # [1, N], on the host
        numbers = torch.tensor([rows, positions]).to(cache.device, non_blocking=True)
        self.rows, self.positions = numbers[:1], numbers[1:]  # [1, N]
        self.padded: Tensor | None = None  # [B, T]; None if all rows have T tokens
        self.is_token: Tensor | None = None  # [B, T]: True for tokens, False for padding; None if there is no padding
        if len(tokens) < self.row_count * self.longest:
            self.padded = torch.tensor(padded).to(cache.device, non_blocking=True)
            columns = torch.arange(self.longest)
            is_token = columns < torch.tensor(counts)[:, None]
            self.is_token = is_token.to(cache.device, non_blocking=True)
        self.masks: dict[tuple[int, int | None], Tensor] = {}  # by G (query heads for each key head) and the window
        self.tokens_of_rows = []
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            self.tokens_of_rows.append(RowTokens(row, start, count))

    def attend(
        self,
        layer: int,
        q: Tensor,
        kv: Tensor,
        window: int | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """See AttentionContext: q [1, H, N, D], kv [1, 2 K, N, D] -> [1, N, H D]. Writes kv to the cache."""
        B = self.row_count
        T = self.longest
        _, H, _, D = q.shape
        K = kv.shape[1] // 2
        cached = self.cache.layers[layer].block[:B]
        # Indices in the first and the third dimension put N before the second one: [1, N, 2 K, D] on both sides.
        cached[self.rows, :, self.positions] = kv.transpose(1, 2).to(cached.dtype)
        k, v = cached[:, :, : self.used].chunk(2, dim=1)  # [B, K, S, D]
        if self.padded is None:
            q = q.view(H, B, T, D)
        else:
            q = q[0][:, self.padded]  # [H, B, T, D]
        # The queries that share a key head are laid end to end, as in `Decode`.
        q = q.transpose(0, 1).reshape(B, K, -1, D)  # [B, K, G T, D], with G = H / K
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask(H // K, window), scale=scale)
        out = out.reshape(B, H, T, D).transpose(1, 2)  # [B, T, H, D]
        if self.is_token is not None:
            out = out[self.is_token]  # [N, H, D]
        return out.reshape(1, -1, H * D)

    def slots_in(self, ring: Ring) -> RingSlots:
        return ring.slots_of(self.rows[0], self.positions[0])

    def row_tokens(self) -> list[RowTokens]:
        return self.tokens_of_rows

    def _mask(self, query_heads: int, window: int | None) -> Tensor:
        """Returns what is added to the scores of each key head: [B, 1, G T, S].

        `query_heads` is G, the number of query heads for each key head.
        """
        if window is not None and window >= self.used:
            window = None
        if (query_heads, window) not in self.masks:
            positions = self.positions[0]  # [N]
            if self.padded is None:
                positions = positions.view(self.row_count, -1)  # [B, T]
            else:
                positions = positions[self.padded]
            mask = self.cache.mask(positions[:, None], self.used, window)  # [B, 1, T, S]
            mask = mask.repeat(1, 1, query_heads, 1)  # [B, 1, G T, S]
            self.masks[query_heads, window] = mask[..., : self.used]
        return self.masks[query_heads, window]
