"""Packs as tensors of a few fixed shapes, so that one CUDA graph runs many packs.

A packing.Pack attends segment by segment, so every pack needs kernels of its own. A MaskedPack attends once, under a
mask, and is padded. This takes O(N^2) memory and more arithmetic, which pays only for packs so short that launching
their kernels takes longer than running them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from r3lite.models.attention import grouped_attention, masked_keys
from r3lite.models.causal_lm import ModelConfig
from r3lite.models.packing import Pack

CPU = torch.device("cpu")
SMALLEST = 128  # tokens of the smallest padded pack
MOST_TOKENS = 4096  # of a padded pack: in a longer one the launches no longer matter, but the mask does


def padded_size(size: int) -> int:
    """Returns the smallest number of SMALLEST times 1, 1.5, 2, 3, 4, 6, 8, ... that is at least `size`."""
    power = SMALLEST
    while power < size:
        if size <= power + power // 2:
            return power + power // 2
        power *= 2
    return power


def has_masked_packs(config: ModelConfig) -> bool:
    """Returns whether a model can run a MaskedPack: all its layers have attention, none has a convolution."""
    return not any(kind.taps for kind in config.layer_kinds)


class PassInputs(NamedTuple):
    """What a pass over a pack with a loss reads. Padding of the pack sees and is seen by itself alone."""

    pack: Tensor  # [3, N]: ids, positions, and for each token the place after the last token that may attend to it
    targets: Tensor  # [2, n]: places of the states that predict trained tokens, and the ids of these tokens
    weights: Tensor  # [n] fp32: the weight of each trained token in the loss, 0 for padding

    @staticmethod
    def of(rows: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]], weight: float) -> "PassInputs":
        """Returns the inputs of a pass over rows, on the host. All tokens that `masks` select have the same weight."""
        pack = Pack.of(rows, CPU)
        places, ids = pack.predicted(masks)
        N = pack.tokens.shape[1]
        padding = padded_size(N) - N
        unpadded = torch.stack([pack.tokens[0], pack.positions[0], torch.tensor(_ends(pack))])
        padding_ends = torch.arange(N + 1, N + padding + 1)
        padding_columns = torch.stack([torch.zeros_like(padding_ends), torch.zeros_like(padding_ends), padding_ends])
        n = len(ids)
        targets = torch.zeros(2, padded_size(n), dtype=torch.long)
        targets[:, :n] = torch.stack([places, ids])
        weights = torch.zeros(targets.shape[1])
        weights[:n] = weight
        return PassInputs(torch.cat([unpadded, padding_columns], dim=1), targets, weights)

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of tokens and of trained tokens, both with padding."""
        return self.pack.shape[1], self.targets.shape[1]

    def to(self, device: torch.device) -> "PassInputs":
        """Returns copies on a device."""
        return PassInputs(*(tensor.to(device) for tensor in self))

    def copy_(self, inputs: "PassInputs") -> None:
        """Overwrites these inputs with others of the same shape. The host does not wait for the device."""
        for tensor, new in zip(self, inputs, strict=True):
            tensor.copy_(new, non_blocking=True)


def _ends(pack: Pack) -> list[int]:
    """Returns for each token of a pack the place after the last token that may attend to it.

    Tokens that attend to a segment lie in it, or in segments below it in the tree. These follow it without a gap.
    """
    segment_ends: list[int] = []
    end = 0
    for segment in pack.segments:
        end += segment.size
        segment_ends.append(end)
        for ancestor in segment.ancestors:
            segment_ends[ancestor] = end
    ends = []
    for segment, segment_end in zip(pack.segments, segment_ends, strict=True):
        ends += [segment_end] * segment.size
    return ends


class MaskedPack:
    """The attention context of a pass over a padded pack, for layers with attention alone: see has_masked_packs."""

    def __init__(self, inputs: PassInputs):
        self.positions = inputs.pack[1:2]  # [1, N]
        self.ends = inputs.pack[2]
        self.masks: dict[int | None, Tensor] = {}  # by window

    def attend(
        self,
        layer: int,
        q: Tensor,
        kv: Tensor,
        window: int | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """See AttentionContext: q [1, H, N, D], kv [1, 2 K, N, D] -> [1, N, H D]."""
        if window not in self.masks:
            self.masks[window] = self._mask(window, q)
        return grouped_attention(q, kv, self.masks[window], scale=scale)

    def _mask(self, window: int | None, q: Tensor) -> Tensor:
        """Returns the mask [N, N] that is added to the scores, in the dtype of the queries q."""
        places = torch.arange(len(self.ends), device=self.ends.device)
        masked = masked_keys(places, places, window=None).logical_or_(self.ends <= places[:, None])  # [query, key]
        if window is not None:
            positions = self.positions[0]
            masked.logical_or_(masked_keys(positions, positions, window))
        mask = torch.zeros(masked.shape, dtype=q.dtype, device=q.device)
        return mask.masked_fill_(masked, float("-inf"))
