"""What a token sees of those before it: the interface that the network asks, masks, and its simplest implementation.

The others are `packing.Pack` (rows laid end to end), and `kv_cache.Prefill` and `kv_cache.Decode` (rows of a cache).
A context belongs to one pass of the model. Shape legend: models/causal_lm.py.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from r3lite.models.functions import causal_convolution
from r3lite.models.gated_delta import ChunkPlan, DeltaHeads, DeltaInputs, delta_chunks

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
        window: int | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Returns the attention's output [B, T, H D] of a layer, for the pass's queries [B, H, T, D].

        `kv` [B, 2 K, T, D] has the pass's keys, then its values. Queries and keys are rotated already. `window` is
        explained at masked_keys; scores are multiplied by `scale`, by default 1 / sqrt(D).
        """

    def convolve(
        self,
        layer: int,
        x: Tensor,
        weight: Tensor,
    ) -> Tensor:
        """Returns the causal convolution [B, T, C] of a layer, for the pass's values x [B, T, C].

        A token sees itself and the taps - 1 tokens before it in its row; before the first there are zeros. The weight
        is [C, taps]. See functions.causal_convolution.
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
    """Rows by themselves: a token attends to itself and to the tokens before it in its row.

    Rows are padded on the right. No token sees what comes after it, so padding needs no mask.
    """

    def __init__(self, input_ids: Tensor):
        """`input_ids` [B, T]: the tokens of the pass."""
        T = input_ids.shape[1]
        self.positions = torch.arange(T, device=input_ids.device)[None]  # [1, T]
        self.masks = StretchMasks([(0, T)])
        self.plan: ChunkPlan | None = None

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
            self.plan = ChunkPlan([T] * B, [None] * B, inputs.qkv.device)
        out, _ = delta_chunks(inputs.flat(), None, heads, self.plan)
        return out.unflatten(0, (B, T))


def preceded_by_zeros(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x [..., T, C] after the zeros that a convolution by a weight [C, taps] sees before it."""
    return F.pad(x, (0, 0, weight.shape[1] - 1, 0))


def grouped_attention(
    q: Tensor,
    kv: Tensor,
    mask: Tensor | None,
    scale: float | None = None,
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
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)  # [B, H, T, D]
    return out.transpose(1, 2).flatten(2)


def masked_keys(
    queries: Tensor,
    keys: Tensor,
    window: int | None,
) -> Tensor:
    """Returns True [..., T, S] where the query at a position [..., T] may not attend to the key at a position [S].

    A token attends to itself and to all tokens before it. In a layer with a window it attends to the last `window` of
    these, as in transformers and arXiv 2310.06825, section 2.
    """
    queries = queries[..., None]
    masked = keys > queries
    if window is not None:
        masked = masked.logical_or_(keys <= queries - window)
    return masked


class StretchMasks:
    """The masks of the stretches of a pass, made for each window when a layer first asks for them.

    A stretch (start, T) is T tokens that come after `start` earlier ones; the keys are those of all start + T tokens.
    """

    def __init__(self, stretches: Sequence[tuple[int, int]]):
        self.stretches = stretches
        self.longest = max((start + T for start, T in stretches), default=0)
        self.by_window: dict[int | None, list[Tensor | None]] = {}

    def of(self, window: int | None, q: Tensor) -> list[Tensor | None]:
        """Returns the mask [T, start + T] of each stretch, on the device and in the dtype of the queries q.

        A mask is added to the scores. It is None if nothing comes before the stretch and the window leaves out nothing:
        `grouped_attention` is causal without a mask. Its rows are aligned, see ALIGNMENT.
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
    length = start + T
    if start == 0 and (window is None or window >= length):
        return None
    aligned = length + -length % ALIGNMENT
    positions = torch.arange(aligned, device=q.device)
    mask = torch.zeros(T, aligned, dtype=q.dtype, device=q.device)
    mask.masked_fill_(masked_keys(positions[start:length], positions, window), float("-inf"))
    return mask[:, :length]
