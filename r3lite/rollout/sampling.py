"""From logits to tokens by inverse transform sampling: one uniform number per token.

A sequence's tokens depend on its logits and its own stream of uniforms only, never on the rest of the batch. The
recorded log-probability is of the softmax of logits / temperature (1 if greedy), without truncation; the trainer
recomputes the same.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from r3lite.settings.rollout import TRUNCATED_ROWS, is_greedy

BLOCK = 128  # neighbouring tokens whose probabilities are summed first; Qwen2's vocabularies are multiples of it
BELOW_ONE = math.nextafter(1.0, 0.0)  # the largest number below 1: in float64 x * BELOW_ONE < x for every normal x > 0


@dataclass(frozen=True)
class Sampler:
    """Temperature, top-k and top-p sampling. At a temperature of 0 or next to it (see `is_greedy`) it is greedy, and
    the log-probabilities are of temperature 1."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __call__(self, logits: Tensor, uniforms: list[float]) -> tuple[Tensor, Tensor]:
        """Returns tokens [B] and their log-probabilities [B] in fp32, for logits [B, V] and `uniforms` [B] in [0, 1).

        A row with a NaN or with infinity has no distribution. Its log-probability is NaN, whatever the temperature and
        the truncation, and its token means nothing. (A logit of -infinity is a token of probability 0, if not all are.)
        """
        greedy = is_greedy(self.temperature)
        scaled = logits.float()
        if not greedy and self.temperature != 1:
            scaled = scaled / self.temperature
        padding = -scaled.shape[-1] % BLOCK
        if padding:
            scaled = F.pad(scaled, (0, padding), value=-math.inf)
        probs = scaled.softmax(-1)  # [B, V], padded to whole blocks
        if greedy:
            tokens = logits.argmax(-1, keepdim=True)
        else:
            tokens = self._draw(probs, uniforms)
        logprobs = probs.gather(-1, tokens).log()
        return tokens[:, 0], logprobs[:, 0]

    def _draw(self, probs: Tensor, uniforms: list[float]) -> Tensor:
        """Returns a token [B, 1] of each row of probabilities [B, V], drawn from those that are not excluded.

        Truncation sorts few rows at a time: a sort takes several times the memory of the probabilities.
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

        We mask with `probs < kth`, so that NaN rows stay NaN: comparisons with NaN are false.
        """
        if self.top_k:
            k = min(self.top_k, probs.shape[-1])
            top_probs = probs.topk(k, dim=-1).values
            kth = top_probs[:, -1:]  # [B, 1]
            probs = probs.masked_fill(probs < kth, 0)
        if self.top_p < 1:
            ordered, order = probs.sort(-1, descending=True)
            # A token stays if the likelier ones together have less than top_p.
            likelier = ordered.cumsum(-1) - ordered
            total = probs.sum(-1, keepdim=True)
            excluded = likelier >= self.top_p * total
            excluded[:, 0] = False  # the likeliest always stays, also if top_p is 0 in float32
            truncated = ordered.masked_fill(excluded, 0)
            probs = torch.zeros_like(probs).scatter(-1, order, truncated)
        return probs


def _inverse_cdf(probs: Tensor, uniforms: list[float]) -> Tensor:
    """Returns the first token of each row, [B, 1], at which the cumulative sum of probs [B, V] exceeds uniform * total.

    First the block is searched, then the token in the block: the cumulative sum of a whole row is never in memory.
    Sums are in float64: in fp32 the error of a sum over 150,000 tokens exceeds a rare token's probability. Comparisons
    with NaN are false: a row of NaNs gives token 0, with log-probability NaN.
    """
    device = probs.device
    if device.type == "mps":  # which has no float64
        probs = probs.cpu()
    blocks = probs.unflatten(-1, (-1, BLOCK))  # [B, blocks, BLOCK]
    rows, block_count, _ = blocks.shape
    # [B, blocks + 1]: 0, then the sum of each block.
    totals = torch.zeros(rows, block_count + 1, dtype=torch.float64, device=blocks.device)
    torch.sum(blocks, -1, dtype=totals.dtype, out=totals[:, 1:])
    ends = totals.cumsum(-1)  # [B, blocks + 1]: 0, then the cumulative sum at the end of each block
    drawn = torch.tensor(uniforms, dtype=ends.dtype)[:, None]  # [B, 1]
    drawn = drawn.to(ends.device, non_blocking=True)
    target = drawn * ends[:, -1:]  # [B, 1], below the total, as uniform numbers are below 1
    is_below = ends[:, 1:] <= target
    block = is_below.sum(-1, keepdim=True)  # [B, 1]
    block_start = ends.gather(-1, block)
    target_in_block = target - block_start
    index = block[..., None].expand(-1, -1, BLOCK)  # [B, 1, BLOCK]
    block_probs = blocks.gather(1, index)[:, 0]  # [B, BLOCK]
    block_sums = block_probs.cumsum(-1, dtype=ends.dtype)
    # By rounding, the block's sum may be smaller here than in `ends`. A target that is not below it would take a token
    # after the last one that has a probability, so we clamp.
    highest = block_sums[:, -1:] * BELOW_ONE
    target_in_block = torch.minimum(target_in_block, highest)
    is_below = block_sums <= target_in_block
    place_in_block = is_below.sum(-1, keepdim=True)
    # block * BLOCK + place_in_block, in one kernel.
    return torch.add(place_in_block, block, alpha=BLOCK).to(device)
