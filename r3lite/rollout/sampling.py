"""From logits to tokens by inverse transform sampling: one uniform number per token.

A sequence's tokens depend on its logits and its own stream of uniforms only, never on the rest of the batch. The
recorded log-probability is that of the softmax of logits / temperature, without top-k and top-p; greedy sampling counts
as temperature 1. The trainer computes log-probabilities of the same distribution.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from r3lite.settings.rollout import TRUNCATED_ROWS, is_greedy

BLOCK = 128  # the inverse CDF first sums blocks of this many tokens; Qwen2's vocabularies are multiples of it
BELOW_ONE = math.nextafter(1.0, 0.0)  # the largest number below 1: in float64 x * BELOW_ONE < x for every normal x > 0


@dataclass(frozen=True)
class Sampler:
    """Sampling with temperature, top-k and top-p; greedy at temperature 0 or next to it (see `is_greedy`)."""

    temperature: float = 1.0
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0  # 1: no limit

    def __call__(self, logits: Tensor, uniforms: list[float]) -> tuple[Tensor, Tensor]:
        """Returns tokens [B] and their log-probabilities [B] in fp32, for logits [B, V] and `uniforms` [B] in [0, 1).

        A row of logits with a NaN or +infinity, or with -infinity only, has no distribution. Its log-probability is
        NaN, whatever the temperature and the truncation, and its token means nothing. Otherwise a token with a logit of
        -infinity has probability 0.
        """
        if is_greedy(self.temperature):
            tokens = logits.argmax(-1, keepdim=True)
            logprobs = logits.log_softmax(-1, dtype=torch.float32).gather(-1, tokens)
        else:
            scaled = logits.float()
            if self.temperature != 1:
                scaled = scaled / self.temperature
            padding = -scaled.shape[-1] % BLOCK  # what V lacks to a multiple of BLOCK
            if padding:
                scaled = F.pad(scaled, (0, padding), value=-math.inf)
            probs = scaled.softmax(-1)  # [B, V], where V now includes the padding
            tokens = self._draw(probs, uniforms)
            logprobs = probs.gather(-1, tokens).log()
        return tokens[:, 0], logprobs[:, 0]

    def _draw(self, probs: Tensor, uniforms: list[float]) -> Tensor:
        """Draws a token from each row of probabilities [B, V], among those that top-k and top-p leave; returns [B, 1].

        Truncation sorts only TRUNCATED_ROWS rows at a time: a sort takes several times the memory of the probabilities.
        """
        if self.top_k == 0 and self.top_p == 1:
            return _inverse_cdf(probs, uniforms)
        tokens = []
        for start in range(0, len(uniforms), TRUNCATED_ROWS):
            rows = slice(start, start + TRUNCATED_ROWS)
            tokens.append(_inverse_cdf(self._truncate(probs[rows]), uniforms[rows]))
        return torch.cat(tokens)

    def _truncate(self, probs: Tensor) -> Tensor:
        """Returns probabilities [B, V] that are 0 where top-k and top-p exclude a token; in each row some stay above 0.

        They are not normalized again. Rows of NaN stay NaN: a comparison with NaN is false, so it masks nothing.
        """
        if self.top_k:
            k = min(self.top_k, probs.shape[-1])
            top_probs = probs.topk(k, dim=-1).values
            kth_largest = top_probs[:, -1:]  # [B, 1]
            probs = probs.masked_fill(probs < kth_largest, 0)
        if self.top_p < 1:
            ordered, order = probs.sort(-1, descending=True)
            # A token stays if all likelier tokens together have less than top_p of the row's total.
            sum_of_likelier = ordered.cumsum(-1) - ordered
            total = probs.sum(-1, keepdim=True)
            excluded = sum_of_likelier >= self.top_p * total
            excluded[:, 0] = False  # the likeliest token always stays, even if top_p rounds to 0 in float32
            truncated = ordered.masked_fill(excluded, 0)
            probs = torch.zeros_like(probs).scatter(-1, order, truncated)
        return probs


def _inverse_cdf(probs: Tensor, uniforms: list[float]) -> Tensor:
    """Returns the first token of each row, [B, 1], at which the cumulative sum of probs [B, V] exceeds uniform * total.

    The block that contains the token is searched first, then the token in the block, so that the cumulative sum of a
    whole row is never in memory. Sums are in float64: in fp32 the error of a sum over 150,000 tokens exceeds a rare
    token's probability. A row of NaNs gives token 0, because comparisons with NaN are false.
    """
    device = probs.device
    if device.type == "mps":  # which has no float64
        probs = probs.cpu()
    blocks = probs.unflatten(-1, (-1, BLOCK))  # [B, blocks, BLOCK]
    row_count, block_count, _ = blocks.shape
    # [B, blocks + 1]: 0, then the sum of each block.
    totals = torch.zeros(row_count, block_count + 1, dtype=torch.float64, device=blocks.device)
    torch.sum(blocks, -1, out=totals[:, 1:])  # in float64, the dtype of `out`
    row_sums = totals.cumsum(-1)  # [B, blocks + 1]: 0, then the sum of the row up to the end of each block
    drawn = torch.tensor(uniforms, dtype=row_sums.dtype).to(row_sums.device, non_blocking=True)
    target = drawn[:, None] * row_sums[:, -1:]  # [B, 1], below the row's total, because uniform numbers are below 1
    # The index of the block is the number of blocks that end at or below the target.
    is_passed = row_sums[:, 1:] <= target
    block_index = is_passed.sum(-1, keepdim=True)  # [B, 1]
    target_in_block = target - row_sums.gather(-1, block_index)  # less the sum before the block
    gather_index = block_index[..., None].expand(-1, -1, BLOCK)  # [B, 1, BLOCK]
    block_probs = blocks.gather(1, gather_index)[:, 0]  # [B, BLOCK]
    block_sums = block_probs.cumsum(-1, dtype=row_sums.dtype)
    # By rounding, the sum of the block may be a little smaller in `block_sums` than in `totals`. The target is kept
    # below the former: otherwise no cumulative sum of the block would exceed it.
    target_in_block = torch.minimum(target_in_block, block_sums[:, -1:] * BELOW_ONE)
    is_passed = block_sums <= target_in_block
    # block_index * BLOCK + the index in the block, in one kernel.
    return torch.add(is_passed.sum(-1, keepdim=True), block_index, alpha=BLOCK).to(device)
