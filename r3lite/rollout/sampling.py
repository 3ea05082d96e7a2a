"""From logits to tokens: one uniform number a token, inverse of the cumulative distribution.

A sequence's tokens depend on its logits and its own stream of uniforms only, never on what it is batched with. The
recorded log-probability is that of the temperature-scaled, untruncated distribution: what a trainer recomputes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 512  # neighbouring tokens whose probabilities are summed first


@dataclass(frozen=True)
class Sampler:
    """Temperature, top-k and top-p sampling; temperature 0 is greedy (and records log-probs at temperature 1)."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __call__(self, logits: Tensor, uniforms: list[float]) -> tuple[Tensor, Tensor]:
        """Tokens [B] and their log-probabilities [B] in float64, one of each per row of logits [B, V]."""
        wide = logits.float()
        wide = wide / self.temperature if self.temperature not in (0, 1) else wide
        top, likeliest = wide.max(-1, keepdim=True)  # [B, 1]
        weights = (wide - top).exp_()  # [B, V], the likeliest has 1
        sums = _block_sums(weights)  # [B, blocks]
        log_z = sums.sum(-1, keepdim=True).log()  # [B, 1]
        tokens = likeliest
        if self.temperature:
            if self.top_k or self.top_p < 1:
                weights = self._truncate(weights)
                sums = _block_sums(weights)
            drawn = torch.tensor(uniforms, dtype=sums.dtype).to(sums.device, non_blocking=True)
            tokens = _inverse_cdf(weights, sums, drawn[:, None])
        logprobs = (wide.gather(-1, tokens) - top).to(log_z.dtype) - log_z
        return tokens[:, 0], logprobs[:, 0]

    def _truncate(self, probs: Tensor) -> Tensor:
        """Sets to 0 what top-k and top-p exclude."""
        if self.top_k:
            kth = probs.topk(min(self.top_k, probs.shape[-1]), dim=-1).values[:, -1:]  # [B, 1]
            probs = probs.where(probs >= kth, 0)
        if self.top_p < 1:
            ordered, order = probs.sort(-1, descending=True)
            # A token stays if the likelier ones together do not reach top_p yet: the likeliest always stays.
            before = ordered.cumsum(-1) - ordered
            keep = before < self.top_p * probs.sum(-1, keepdim=True)
            probs = torch.zeros_like(probs).scatter(-1, order, ordered.where(keep, 0))
        return probs


def _block_sums(weights: Tensor) -> Tensor:
    """Sums [B, blocks] of BLOCK neighbours each of weights [B, V], the last block shorter.

    In float64: in fp32 the sum over 150,000 tokens is off by more than a rare token's probability. (On the CPU if
    the device has no float64, as Apple's.)
    """
    weights = weights.cpu() if weights.device.type == "mps" else weights
    whole = weights.shape[-1] // BLOCK * BLOCK
    sums = [weights[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1, dtype=torch.float64)]
    if whole < weights.shape[-1]:
        sums.append(weights[:, whole:].sum(-1, keepdim=True, dtype=torch.float64))
    return torch.cat(sums, dim=-1)


def _inverse_cdf(weights: Tensor, sums: Tensor, uniforms: Tensor) -> Tensor:
    """The tokens [B, 1] at which the cumulative weights [B, V] pass uniforms [B, 1] of their sum.

    First the block, then the token in it, so that the running sum of a whole row is never in memory.
    """
    cumulative = sums.cumsum(-1)  # [B, blocks]
    target = _below(uniforms * cumulative[:, -1:], cumulative[:, -1:])  # [B, 1]
    # Past the end only if there are NaNs: the log-probability will show it, an index error would not.
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=sums.shape[-1] - 1)
    before = (cumulative - sums).gather(-1, block)
    index = block * BLOCK + torch.arange(BLOCK, device=block.device)  # [B, BLOCK]
    inside = weights.to(sums.device).gather(-1, index.clamp(max=weights.shape[-1] - 1)).double()
    inside = inside.masked_fill(index >= weights.shape[-1], 0).cumsum(-1)
    chosen = block * BLOCK + torch.searchsorted(inside, _below(target - before, inside[:, -1:]), right=True)
    return chosen.clamp_(max=weights.shape[-1] - 1).to(weights.device)


def _below(target: Tensor, total: Tensor) -> Tensor:
    """The target, kept below the total: it may be rounded up to it, and past it are tokens without probability."""
    return torch.minimum(target, total.nextafter(torch.zeros_like(total)))
