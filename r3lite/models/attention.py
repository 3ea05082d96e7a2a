"""What a query may attend to: the interface that the network asks, and its simplest implementation.

The others are `packing.Pack` (rows laid end to end), and `kv_cache.Prefill` and `kv_cache.Decode` (rows of a cache).
A context belongs to one pass of the model. Shape legend: models/causal_lm.py.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# The memory-efficient kernel, the only fused one on Turing cards, reads masks whose rows begin at multiples of this
# many numbers. Of any other mask PyTorch makes a copy in every layer, and keeps it for the backward pass
# (`preprocess_mask` in aten/src/ATen/native/transformers/attention.cpp).
ALIGNMENT = 8


class AttentionContext(Protocol):
    """Where the tokens of a pass are in their rows, and which keys and values each of them attends to."""

    positions: Tensor  # [B, T], or [1, T] if all rows have the same

    def attend(
        self,
        layer: int,
        q: Tensor,
        kv: Tensor,
    ) -> Tensor:
        """Returns the attention's output [B, T, H D] of a layer, for the pass's queries [B, H, T, D].

        `kv` [B, 2 K, T, D] has the pass's keys, then its values. Queries and keys are rotated already.
        """


class CausalRows:
    """Rows by themselves: a token attends to itself and to the tokens before it in its row.

    Rows are padded on the right. No token sees what comes after it, so padding needs no mask.
    """

    def __init__(self, input_ids: Tensor):
        """`input_ids` [B, T]: the tokens of the pass."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        self.positions = positions[None]  # [1, T]

    def attend(
        self,
        layer: int,
        q: Tensor,
        kv: Tensor,
    ) -> Tensor:
        return grouped_attention(q, kv, None)


def grouped_attention(
    q: Tensor,
    kv: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """Returns the attention's output [B, T, H D] for queries [B, H, T, D].

    `kv` [B, 2 K, S, D] has the keys, then the values. Without a mask the attention is causal. Each key/value head
    serves H / K query heads. Heads are expanded rather than enable_gqa: on CUDA that flag is served only by the flash
    and math kernels, so cards without FlashAttention-2 would fall silently to the O(T^2) math kernel.
    """
    B, K2, S, D = kv.shape
    query_heads = 2 * q.shape[1] // K2  # of each key head
    kv = kv[:, :, None].expand(B, K2, query_heads, S, D)
    k, v = kv.reshape(B, -1, S, D).chunk(2, dim=1)  # [B, H, S, D]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)  # [B, H, T, D]
    return out.transpose(1, 2).flatten(2)


def causal_masks(
    stretches: Sequence[tuple[int, int]],
    device: torch.device,
    dtype: torch.dtype,
) -> list[Tensor | None]:
    """Returns for each (start, T) the mask [T, start + T] of T tokens that come after `start` earlier ones.

    A mask is added to the scores. It is None if nothing comes before: `grouped_attention` is causal without a mask. Its
    rows are aligned, see ALIGNMENT.
    """
    longest = max((T for start, T in stretches if start), default=0)
    causal = torch.full((longest, longest), float("-inf"), dtype=dtype, device=device).triu(1)
    masks: list[Tensor | None] = []
    for start, T in stretches:
        if start == 0:
            masks.append(None)
            continue
        length = start + T
        padding = -length % ALIGNMENT
        padded = F.pad(causal[:T, :T], (start, padding))
        masks.append(padded[:, :length])
    return masks
