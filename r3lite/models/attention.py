"""What a query may attend to: the interface that the network asks, and its simplest implementation.

The others are `packing.Pack` (rows laid end to end), and `kv_cache.Prefill` and `kv_cache.Decode` (rows of a cache).
A context belongs to one pass of the model. Shape legend: models/qwen2.py.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class AttentionContext(Protocol):
    """Where the tokens of a pass are in their rows, and which keys and values each of them attends to."""

    positions: Tensor  # [B, T], or [1, T] if all rows have the same

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention's output [B, T, H D] of a layer, for the pass's queries [B, H, T, D], keys and values [B, K, T, D].

        Queries and keys are rotated already.
        """


class CausalRows:
    """Rows by themselves: a token attends to itself and to the tokens before it in its row.

    Rows are padded on the right. No token sees what comes after it, so padding needs no mask.
    """

    def __init__(self, input_ids: Tensor):
        """`input_ids` [B, T]: the tokens of the pass."""
        self.positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]  # [1, T]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return grouped_attention(q, k, v, None)


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention's output [B, T, H D] for queries [B, H, T, D], keys and values [B, K, S, D]; causal without a mask.

    Each key/value head serves H / K query heads. Heads are expanded rather than enable_gqa: on CUDA that flag is served
    only by the flash and math kernels, so cards without FlashAttention-2 would fall silently to the O(T^2) math kernel.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)  # [B, H, S, D]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)  # [B, H, T, D]
    return out.transpose(1, 2).flatten(2)


def causal_masks(stretches: Sequence[tuple[int, int]], device: torch.device, dtype: torch.dtype) -> list[Tensor | None]:
    """What is added to the scores of T tokens that come after `start` others, [T, start + T], for each (start, T).

    None if nothing comes before: `grouped_attention` is causal without a mask.
    """
    longest = max((T for start, T in stretches if start), default=0)
    causal = torch.full((longest, longest), float("-inf"), dtype=dtype, device=device).triu(1)
    return [F.pad(causal[:T, :T], (start, 0)) if start else None for start, T in stretches]
