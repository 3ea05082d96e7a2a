"""What a token sees of those before it: the interface `AttentionContext`, its simplest implementation, and masks.

Other implementations are `packing.Pack` and `masked_pack.MaskedPack` (rows laid end to end), and `kv_cache.Prefill`,
`kv_cache.Decode` and `verification.Verification` (rows of a cache).
A context belongs to one pass of the model. Shape legend: models/causal_lm.py.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from r3lite.models.functions import causal_convolution
from r3lite.models.gated_delta import ChunkPlan, DeltaHeads, DeltaInputs, delta_chunks

# The memory-efficient kernel, the only fused one on Turing cards, reads masks whose rows begin at multiples of this
# many numbers. PyTorch copies any other mask in every layer, and keeps the copies for the backward pass
# (`preprocess_mask` in aten/src/ATen/native/transformers/attention.cpp).
ALIGNMENT = 8


class AttentionContext(Protocol):
    """Where the tokens of a pass are in their rows, and which keys and values each of them attends to."""

    positions: Tensor  # of the tokens in their rows: [B, T], or [1, T] if all rows have the same positions

    def attend(
        self,
        layer: int,
        q: Tensor,
        kv: Tensor,
        window: int | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Returns the attention's output [B, T, H D] of a layer, for the pass's queries [B, H, T, D].

        `kv` [B, 2 K, T, D] has the pass's keys, then its values. Queries and keys are already rotated. For `window` see
        masked_keys. Scores are multiplied by `scale`, by default 1 / sqrt(D).
        """

    def convolve(
        self,
        layer: int,
        x: Tensor,
        weight: Tensor,
    ) -> Tensor:
        """Returns the causal convolution [B, T, C] of a layer, for the pass's values x [B, T, C].

        A token sees itself and the taps - 1 tokens before it in its row; before a row's first token there are zeros.
        The weight is [C, taps]. See functions.causal_convolution.
        """

    def apply_delta_rule(
        self,
        layer: int,
        inputs: DeltaInputs,
        heads: DeltaHeads,
    ) -> Tensor:
        """Returns the outputs [B, T, H D_v] of a layer's gated delta rule, for inputs of [B, T] tokens.

        The state is zeros before the first token of a row. See gated_delta.py.
        """


class CausalRows:
    """The context of padded rows [B, T]: a token attends to itself and to the tokens before it in its row.

    Padding is on the right, where no token sees it, so it needs no mask.
    """

    def __init__(self, input_ids: Tensor):
        """`input_ids` [B, T]: the tokens of the pass."""
        T = input_ids.shape[1]
        self.positions = torch.arange(T, device=input_ids.device)[None]  # [1, T]
        self.masks = StretchMasks([(0, T)])
        self.plan: ChunkPlan | None = None  # made when a layer with the delta rule first asks for it

    def attend(
        self,
        layer: int,
        q: Tensor,
        kv: Tensor,
        window: int | None = None,
        scale: float | None = None,
    ) -> Tensor:
        (mask,) = self.masks.of(window, q)
        return grouped_attention(q, kv, mask, scale=scale)

    def convolve(
        self,
        layer: int,
        x: Tensor,
        weight: Tensor,
    ) -> Tensor:
        return causal_convolution(preceded_by_zeros(x, weight), weight)

    def apply_delta_rule(
        self,
        layer: int,
        inputs: DeltaInputs,
        heads: DeltaHeads,
    ) -> Tensor:
        B, T, _ = inputs.qkv.shape
        if self.plan is None:
            # Each row is a stretch of its own: it continues no other one.
            self.plan = ChunkPlan(sizes=[T] * B, parents=[None] * B, device=inputs.qkv.device)
        out, _ = delta_chunks(inputs.flat(), None, heads, self.plan)  # None: all states begin with zeros
        return out.unflatten(0, (B, T))


def preceded_by_zeros(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x [..., T, C] with taps - 1 zeros put before it: what a convolution by a weight [C, taps] reads."""
    return F.pad(x, (0, 0, weight.shape[1] - 1, 0))


def grouped_attention(
    q: Tensor,
    kv: Tensor,
    mask: Tensor | None,
    scale: float | None = None,
) -> Tensor:
    """Returns the attention's output [B, T, H D] for queries [B, H, T, D].

    `kv` [B, 2 K, S, D] has the keys, then the values. Without a mask the attention is causal. Each key/value head
    serves H / K query heads, and is copied for each of them. PyTorch's flag enable_gqa would save the copies, but on
    CUDA only the flash and math kernels know it: cards without FlashAttention-2 would silently use the math kernel,
    which takes O(T^2) memory.
    """
    B, keys_and_values, S, D = kv.shape  # keys_and_values: 2 K
    H = q.shape[1]
    group = H // (keys_and_values // 2)  # the number of query heads of each key head
    kv = kv[:, :, None].expand(B, keys_and_values, group, S, D)
    k, v = kv.reshape(B, -1, S, D).chunk(2, dim=1)  # [B, H, S, D]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)  # [B, H, T, D]
    return out.transpose(1, 2).flatten(2)


def masked_keys(
    queries: Tensor,
    keys: Tensor,
    window: int | None,
) -> Tensor:
    """Returns [..., T, S]: True where a query may not attend to a key.

    `queries` [..., T] and `keys` [S] are positions. A token attends to itself and to all tokens before it. In a layer
    with a window it attends only to the last `window` tokens, itself included (arXiv 2310.06825, section 2; as in
    transformers).
    """
    queries = queries[..., None]
    masked = keys > queries
    if window is not None:
        masked = masked.logical_or_(keys <= queries - window)
    return masked


def aligned(columns: int) -> int:
    """Returns the smallest multiple of ALIGNMENT that is at least `columns`, the number of columns of a mask."""
    return math.ceil(columns / ALIGNMENT) * ALIGNMENT


class StretchMasks:
    """The masks of the stretches of a pass, made for each window when a layer first asks for them.

    A stretch (start, T) is T new tokens after `start` earlier ones. Its queries are those of the T new tokens, its keys
    those of all start + T tokens.
    """

    def __init__(self, stretches: Sequence[tuple[int, int]]):
        self.stretches = stretches
        self.longest = max((start + T for start, T in stretches), default=0)
        self.by_window: dict[int | None, list[Tensor | None]] = {}

    def of(self, window: int | None, q: Tensor) -> list[Tensor | None]:
        """Returns the mask [T, start + T] of each stretch, on the device and in the dtype of the queries q.

        A mask is added to the scores. Its rows are aligned, see ALIGNMENT. It is None if no token comes before the
        stretch and the window covers the stretch: `grouped_attention` without a mask is causal, which is then enough.
        """
        if window is not None and window >= self.longest:
            window = None
        if window not in self.by_window:
            self.by_window[window] = [_stretch_mask(start, T, window, q) for start, T in self.stretches]
        return self.by_window[window]


def _stretch_mask(
    start: int,
    T: int,
    window: int | None,
    q: Tensor,
) -> Tensor | None:
    """Returns the mask of one stretch, see StretchMasks.of."""
    length = start + T
    if start == 0 and (window is None or window >= length):
        return None
    columns = aligned(length)
    positions = torch.arange(columns, device=q.device)
    mask = torch.zeros(T, columns, dtype=q.dtype, device=q.device)
    mask.masked_fill_(masked_keys(positions[start:length], positions, window), float("-inf"))
    return mask[:, :length]
