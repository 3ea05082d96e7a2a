"""Losses of PPO and GRPO, per token. Pure functions: tensors of one shape in, tensors of that shape out."""

import torch
from torch import Tensor


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """Clipped surrogate (arXiv 1707.06347, eq. 7): -min(r A, clip(r, 1 - low, 1 + high) A), r = exp(logp - old)."""
    ratio = (logprobs - old_logprobs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def clipped(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Where the clip took the gradient away: below (A < 0) and above (A > 0), as booleans."""
    ratio = (logprobs - old_logprobs).exp()
    return (ratio < 1 - clip_low) & (advantages < 0), (ratio > 1 + clip_high) & (advantages > 0)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Clipped value loss: 0.5 max((V - R)^2, (clip(V, old - c, old + c) - R)^2)."""
    near = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)


def k1_kl(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Unbiased estimate of KL(policy || reference) per sampled token: logp - ref; PPO pays it as a penalty."""
    return logprobs - reference


def k3_kl(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Schulman's k3 estimate, never negative: exp(d) - d - 1 with d = ref - logp; GRPO has it in the loss."""
    d = reference - logprobs
    return d.exp() - d - 1
