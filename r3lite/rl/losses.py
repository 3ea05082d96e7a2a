"""Losses per token, normalizers, and the metrics of an update.

Pure functions. A loss takes and returns tensors of one shape, but for `truncated_kl`. A normalizer gives the weight of
each token in the loss of a mini-batch, sum(weight * loss): it takes the mask [B, T] of the tokens that have a loss and
returns their weights [B, T], 0 elsewhere.

Metrics are summed over tokens chunk by chunk, and then divided by the number of tokens. There are three kinds of
tokens, and the name of a metric begins with its kind: OFF_POLICY, tokens that the policy did not sample; GUIDED, tokens
with a teacher's distribution; without a prefix, the policy's own tokens that learn from rewards.
"""

import math

import torch
from torch import Tensor

TokenLoss = tuple[Tensor, dict[str, Tensor]]  # a loss [N], and metrics [N] by name
Sums = dict[str, Tensor | int]  # sums over tokens by the name of the metric, and numbers of tokens, see TOKENS
OFF_POLICY = "off_policy/"
GUIDED = "teacher/"
TOKENS = "tokens"  # `<kind>tokens` is the number of tokens of a kind, by which its sums are divided
MIN_REMAINDER = 1e-6  # least p' and q' of `truncated_kl`: in fp32, 1 minus a sum is not exact below it


def clipped_surrogate(
    log_ratios: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """Clipped surrogate (arXiv 1707.06347, eq. 7): -min(r A, clip(r, 1 - low, 1 + high) A), r = exp(log-ratio).

    Returns the loss, and two masks of the tokens whose gradient the clip removes: a ratio below the range with A < 0,
    and one above it with A > 0.
    """
    ratio = log_ratios.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    metrics = {
        "clip_ratio/low_mean": (ratio < 1 - clip_low) & (advantages < 0),
        "clip_ratio/high_mean": (ratio > 1 + clip_high) & (advantages > 0),
    }
    return loss, metrics


def shaped_surrogate(log_ratios: Tensor, advantages: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Policy shaping (arXiv 2504.14945, section 3.2): -f(r) A with f(r) = r / (r + gamma), r = exp(log-ratio); no clip.

    Returns the loss and f(r). The gradient with respect to log pi is -A f(r) (1 - f(r)), which is largest at r = gamma:
    the policy learns most from tokens that it finds unlikely, and little from those that it would write anyway.
    """
    shaped = torch.sigmoid(log_ratios - math.log(gamma))
    return -shaped * advantages, shaped


def value_loss(
    values: Tensor,
    old_values: Tensor,
    targets: Tensor,
    clip: float | None,
) -> Tensor:
    """The critic's loss: 0.5 max((V - R)^2, (clip(V, old - c, old + c) - R)^2), or 0.5 (V - R)^2 if `clip` is None."""
    error = (values - targets) ** 2
    if clip is None:
        return 0.5 * error
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    clipped_error = (clipped - targets) ** 2
    return 0.5 * torch.maximum(error, clipped_error)


def k1_kl(logprobs: Tensor, reference: Tensor) -> Tensor:
    """The k1 estimate of KL(policy || reference) per sampled token, unbiased: d = logp - ref.

    Its gradient is 0 in the mean, so it can be part of a reward but not of a loss.
    """
    return logprobs - reference


def k2_kl(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Schulman's k2 estimate, never negative: d^2 / 2. Biased, but its gradient is that of the divergence."""
    return 0.5 * (logprobs - reference) ** 2


def k3_kl(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Schulman's k3 estimate, unbiased and never negative: exp(-d) + d - 1."""
    d = logprobs - reference
    return (-d).exp() + d - 1


KL_ESTIMATES = {"k1": k1_kl, "k2": k2_kl, "k3": k3_kl}


def truncated_kl(teacher: Tensor, logprobs: Tensor) -> Tensor:
    """KL(teacher || policy) [N] from both log-probabilities [N, k] of the same k tokens.

    All other tokens count as one, with the remaining probability: sum_j p_j log(p_j / q_j) + p' log(p' / q'), where
    p' = 1 - sum_j p_j, and q' likewise. It is never above the divergence over the whole vocabulary, and 0 only if both
    agree on the probability of each of the k tokens. The k probabilities are not renormalized, so that mass on other
    tokens counts, too.
    """
    teacher_remainder = _remaining_probability(teacher)
    policy_remainder = _remaining_probability(logprobs)
    kl_of_tokens = (teacher.exp() * (teacher - logprobs)).sum(-1)
    return kl_of_tokens + teacher_remainder * (teacher_remainder.log() - policy_remainder.log())


def _remaining_probability(logprobs: Tensor) -> Tensor:
    """The probability [N] of all tokens but the k whose log-probabilities [N, k] these are."""
    probability = logprobs.exp().sum(-1)
    return probability.neg().add(1).clamp(min=MIN_REMAINDER)


def token_mean(mask: Tensor) -> Tensor:
    """Weights of the mean over all tokens: a long episode counts more than a short one."""
    return mask / mask.sum().clamp(min=1)


def episode_mean(mask: Tensor) -> Tensor:
    """Weights of the mean over each episode's tokens, then over the episodes: a token of a long one counts less."""
    lengths = mask.sum(-1, keepdim=True).clamp(min=1)
    return mask / (lengths * len(mask))


def episode_sum(mask: Tensor, constant: int = 1) -> Tensor:
    """Weights of the sum over each episode's tokens, divided by a constant, then the mean over the episodes."""
    return mask / (constant * len(mask))


def token_sums(metrics: dict[str, Tensor], off_policy: Tensor | None = None) -> Sums:
    """Sums metrics [N] over the tokens of each metric's kind.

    `off_policy` [N] tells which tokens are off-policy. If it is None, each metric is summed over all tokens, which are
    then of one kind: on-policy or guided.
    """
    if off_policy is None:
        return {name: x.detach().sum() for name, x in metrics.items()}
    sums: Sums = {}
    for name, x in metrics.items():
        mask = off_policy if name.startswith(OFF_POLICY) else ~off_policy
        sums[name] = (x.detach() * mask).sum()
    return sums


def sum_by_name(parts: list[Sums]) -> Sums:
    """Returns the sum of each name over the parts, added in their order."""
    totals: Sums = {}
    for part in parts:
        for name, x in part.items():
            totals[name] = totals.get(name, 0.0) + x
    return totals


def means_of(sums: Sums) -> dict[str, float]:
    """Divides sums by the number of tokens of their kind, which `sums` has as `<kind>tokens`."""
    means = {}
    for name, total in sums.items():
        count_name = _kind(name) + TOKENS
        if name != count_name:  # a number of tokens is no metric
            means[name] = float(total) / sums[count_name]
    return means


def _kind(name: str) -> str:
    """Returns the kind of tokens over which a metric is a mean: OFF_POLICY, GUIDED or "", see the top of this file."""
    for kind in (OFF_POLICY, GUIDED):
        if name.startswith(kind):
            return kind
    return ""


def sampling_metrics(log_ratios: list[Tensor], clip_low: float, clip_high: float) -> dict[str, float]:
    """Measures how far the trainer's probabilities are from the sampler's.

    Takes the log-ratios [2, N] of each mini-batch of the first epoch: row 0 is the current log-probability less that of
    the sampler, row 1 the log of the ratio that the algorithm clips.

    The differences, under TRL's names, are |row 0| of the first mini-batch alone. That mini-batch runs before the first
    optimizer step, with the weights of the sampler, so the differences are rounding only. (With --max-staleness 1 they
    may be more: the sampler may have had the weights of the round before.) The share of tokens with a ratio outside the
    clip, whatever their advantages, is over the whole epoch, in which the policy moves. A metric without tokens is left
    out.
    """
    metrics = {}
    first_mini_batch = log_ratios[0]
    difference = first_mini_batch[0].abs()
    if len(difference):
        metrics["sampling/sampling_logp_difference/mean"] = float(difference.mean())
        metrics["sampling/sampling_logp_difference/max"] = float(difference.max())
    ratio = torch.cat(log_ratios, dim=1)[1].exp()
    outside = (ratio < 1 - clip_low) | (ratio > 1 + clip_high)
    if len(outside):
        metrics["sampling/outside_clip_first_epoch"] = float(outside.float().mean())
    return metrics
