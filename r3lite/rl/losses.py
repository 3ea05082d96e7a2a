"""Losses that algorithms are made of, per token. Pure functions: tensors of one shape in, tensors of that shape out."""

import torch
from torch import Tensor


def clipped_surrogate(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate (arXiv 1707.06347, eq. 7): -min(r A, clip(r, 1 - low, 1 + high) A), r = exp(logp - old).

    Returns the loss, and as booleans the tokens whose gradient the clip removed: below (A < 0) and above (A > 0).
    """
    ratio = (logprobs - old_logprobs).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    return loss, {
        "clip_ratio/low_mean": (ratio < 1 - clip_low) & (advantages < 0),
        "clip_ratio/high_mean": (ratio > 1 + clip_high) & (advantages > 0),
    }


def clipped_value_loss(values: Tensor, old_values: Tensor, targets: Tensor, clip: float) -> Tensor:
    """Clipped value loss: 0.5 max((V - R)^2, (clip(V, old - c, old + c) - R)^2)."""
    near = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - targets) ** 2, (near - targets) ** 2)


def k1_kl(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Unbiased estimate of KL(policy || reference) per sampled token: logp - ref."""
    return logprobs - reference


def k3_kl(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Schulman's k3 estimate of the same, never negative: exp(d) - d - 1 with d = ref - logp."""
    d = reference - logprobs
    return d.exp() - d - 1
