"""Losses that algorithms are made of, per token, and normalizers: the weight of each token in the loss of a mini-batch,
which is sum(weight * loss). Pure functions: tensors of one shape in, tensors of that shape out.

A normalizer takes the mask [B, T] of the tokens that have a loss and returns their weights [B, T], 0 elsewhere. They
differ in what counts alike: each token, or each episode whatever its length.
"""

import math

import torch
from torch import Tensor

LEAST = 1e-6  # the least probability of all tokens but k together: 1 less an fp32 sum is not known more exactly


def clipped_surrogate(
    log_ratios: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate (arXiv 1707.06347, eq. 7): -min(r A, clip(r, 1 - low, 1 + high) A), r = exp(log-ratio).

    Returns the loss, and as booleans the tokens whose gradient the clip removed: below (A < 0) and above (A > 0).
    """
    ratio = log_ratios.exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    return loss, {
        "clip_ratio/low_mean": (ratio < 1 - clip_low) & (advantages < 0),
        "clip_ratio/high_mean": (ratio > 1 + clip_high) & (advantages > 0),
    }


def shaped_surrogate(log_ratios: Tensor, advantages: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Policy shaping (arXiv 2504.14945, section 3.2): -f(r) A with f(r) = r / (r + gamma), r = exp(log-ratio); no clip.

    Returns the loss and f(r). The gradient by log pi is -A f(r) (1 - f(r)): largest where r = gamma, so that it is
    what the policy thinks unlikely that it learns from, and not what it says already.
    """
    shaped = torch.sigmoid(log_ratios - math.log(gamma))
    return -shaped * advantages, shaped


def value_loss(values: Tensor, old_values: Tensor, targets: Tensor, clip: float | None) -> Tensor:
    """0.5 max((V - R)^2, (clip(V, old - c, old + c) - R)^2), or 0.5 (V - R)^2 if `clip` is None."""
    error = (values - targets) ** 2
    if clip is None:
        return 0.5 * error
    near = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum(error, (near - targets) ** 2)


def k1_kl(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Unbiased estimate of KL(policy || reference) per sampled token: d = logp - ref.

    Its own gradient is 0 in the mean, so it has its place in a reward and none in a loss.
    """
    return logprobs - reference


def k2_kl(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Schulman's k2 estimate of the same, never negative: d^2 / 2. Biased, but its gradient is the divergence's."""
    return 0.5 * (logprobs - reference) ** 2


def k3_kl(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Schulman's k3 estimate of the same, unbiased and never negative: exp(-d) + d - 1."""
    d = reference - logprobs
    return d.exp() - d - 1


KL_ESTIMATES = {"k1": k1_kl, "k2": k2_kl, "k3": k3_kl}


def truncated_kl(teacher: Tensor, logprobs: Tensor) -> Tensor:
    """KL(teacher || policy) [n] of distributions of which k log-probabilities [n, k] are known, of the same tokens.

    All other tokens count as one, with the probability that is left: sum_j p_j log(p_j / q_j) + p' log(p' / q'), where
    p' = 1 - sum_j p_j. It is never above the divergence over the whole vocabulary, and 0 only if both give all k tokens
    the same probabilities. Nothing is renormalized: a policy that puts its mass elsewhere pays for it.
    """
    rest, left = (x.exp().sum(-1).neg().add(1).clamp(min=LEAST) for x in (teacher, logprobs))
    return (teacher.exp() * (teacher - logprobs)).sum(-1) + rest * (rest.log() - left.log())


def token_mean(mask: Tensor) -> Tensor:
    """The mean over all tokens: a long episode counts more than a short one."""
    return mask / mask.sum().clamp(min=1)


def episode_mean(mask: Tensor) -> Tensor:
    """The mean over each episode's tokens, then over the episodes: a token of a long episode counts less."""
    return mask / (mask.sum(-1, keepdim=True).clamp(min=1) * len(mask))


def episode_sum(mask: Tensor, constant: int = 1) -> Tensor:
    """The sum over each episode's tokens, divided by a constant, then the mean over the episodes."""
    return mask / (constant * len(mask))
