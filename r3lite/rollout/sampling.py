"""From logits to tokens: one uniform number a token, inverse of the cumulative distribution.

A sequence's tokens depend on its logits and its own stream of uniforms only, never on what it is batched with. The
recorded log-probability is that of the temperature-scaled, untruncated distribution: what a trainer recomputes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampler:
    """Temperature, top-k and top-p sampling; temperature 0 is greedy (and records log-probs at temperature 1)."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __call__(self, logits: Tensor, uniforms: list[float]) -> tuple[list[int], list[float]]:
        """Tokens and their log-probabilities, one of each per row of logits [B, V]."""
        logprobs = torch.log_softmax(logits.float() / (self.temperature or 1.0), dim=-1)  # [B, V]
        if self.temperature == 0:
            tokens = logprobs.argmax(-1, keepdim=True)  # [B, 1]
        else:
            # Summed in float64: in fp32 the sum over 150,000 tokens is off by more than a rare token's probability.
            # (The CPU does it where the device, as Apple's, has no float64.)
            wide = logprobs.cpu() if logprobs.device.type == "mps" else logprobs
            cumulative = self._truncate(wide.double().exp()).cumsum(-1)  # [B, V]
            u = torch.tensor(uniforms, dtype=torch.float64, device=cumulative.device)[:, None]
            tokens = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)  # [B, 1]
            tokens = tokens.clamp(max=logits.shape[-1] - 1).to(logits.device)
        return tokens[:, 0].tolist(), logprobs.gather(-1, tokens)[:, 0].tolist()

    def _truncate(self, probs: Tensor) -> Tensor:
        """Sets to 0 what top-k and top-p exclude."""
        if self.top_k:
            kth = probs.topk(min(self.top_k, probs.shape[-1]), dim=-1).values[:, -1:]  # [B, 1]
            probs = probs.where(probs >= kth, 0)
        if self.top_p < 1:
            ordered, order = probs.sort(-1, descending=True)
            # A token stays if what is likelier than it does not reach top_p yet: the likeliest always stays.
            before = ordered.cumsum(-1) - ordered
            keep = before < self.top_p * probs.sum(-1, keepdim=True)
            probs = torch.zeros_like(probs).scatter(-1, order, ordered.where(keep, 0))
        return probs
