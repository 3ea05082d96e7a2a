"""Losses per token, normalizers, and the metrics of an update.

Pure functions. The arguments and the result of a loss have the same shape, except those of `truncated_kl`. A normalizer
gives the weight of each token in the loss of a mini-batch, sum(weight * loss): it takes the mask [B, T] of the tokens
that have a loss and returns their weights [B, T], 0 elsewhere.

A metric is a mean over tokens of one kind. Sums over the tokens are added up chunk by chunk, and divided by the number
of tokens of that kind at the end. The name of a metric begins with the kind of its tokens:

    OFF_POLICY  tokens that the policy did not sample in this round
    GUIDED      tokens with a teacher's distribution
    no prefix   all others: on-policy tokens, which learn from rewards
"""

import math

import torch
from torch import Tensor

TokenLoss = tuple[Tensor, dict[str, Tensor]]  # the loss [N] of each token, and metrics [N] by name
Sums = dict[str, Tensor | int]  # sums of metrics over tokens, by name; under `<kind>tokens` the number of tokens
OFF_POLICY = "off_policy/"
GUIDED = "teacher/"
TOKENS = "tokens"
MIN_REMAINDER = 1e-6  # least remaining probability in `truncated_kl`: below it, 1 minus an fp32 sum is mostly rounding


def clipped_surrogate(
    log_ratios: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """Clipped surrogate (arXiv 1707.06347, eq. 7): -min(r A, clip(r, 1 - low, 1 + high) A), r = exp(log-ratio).

    The metrics are two masks of tokens that have no gradient because of the clip: at `low_mean` the ratio is below the
    range and A < 0, at `high_mean` it is above the range and A > 0.
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
    the policy learns most from tokens that it finds unlikely, and little from tokens that it would sample anyway.
    """
    shaped = torch.sigmoid(log_ratios - math.log(gamma))  # f(r) = 1 / (1 + exp(log gamma - log r))
    return -shaped * advantages, shaped


def value_loss(
    values: Tensor,
    old_values: Tensor,
    targets: Tensor,
    clip: float | None,
) -> Tensor:
    """The critic's loss: 0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2); without `clip`, 0.5 (V - R)^2.

    V are the values, R the targets, c is `clip`.
    """
    squared_error = (values - targets) ** 2
    if clip is None:
        return 0.5 * squared_error
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    clipped_squared_error = (clipped - targets) ** 2
    return 0.5 * torch.maximum(squared_error, clipped_squared_error)


def k1_kl(logprobs: Tensor, reference: Tensor) -> Tensor:
    """The k1 estimate of KL(policy || reference) at a sampled token, unbiased: d = log pi - log reference.

    Its gradient is 0 on average, so it can be part of a reward but not of a loss.
    """
    return logprobs - reference


def k2_kl(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Schulman's k2 estimate, never negative: d^2 / 2. Biased, but on average its gradient is that of the KL."""
    return 0.5 * (logprobs - reference) ** 2


def k3_kl(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Schulman's k3 estimate, unbiased and never negative: exp(-d) + d - 1."""
    d = logprobs - reference
    return (-d).exp() + d - 1


KL_ESTIMATES = {"k1": k1_kl, "k2": k2_kl, "k3": k3_kl}


def truncated_kl(teacher: Tensor, logprobs: Tensor) -> Tensor:
    """KL(teacher || policy) [N] from the log-probabilities [N, k] that both give the same k tokens.

    All other tokens count as one token, which has the remaining probability p' = 1 - sum_j p_j or q' = 1 - sum_j q_j:

        sum_j p_j log(p_j / q_j) + p' log(p' / q'),    p the teacher's probabilities, q the policy's

    Up to MIN_REMAINDER, this is never above the KL over the whole vocabulary, and 0 only if teacher and policy agree on
    the probability of each of the k tokens.
    """
    teacher_remainder = _remaining_probability(teacher)
    policy_remainder = _remaining_probability(logprobs)
    kl_of_tokens = (teacher.exp() * (teacher - logprobs)).sum(-1)
    return kl_of_tokens + teacher_remainder * (teacher_remainder.log() - policy_remainder.log())


def _remaining_probability(logprobs: Tensor) -> Tensor:
    """1 minus the sum of k probabilities, [N] from their logs [N, k], at least MIN_REMAINDER."""
    probability = logprobs.exp().sum(-1)
    return (1 - probability).clamp(min=MIN_REMAINDER)


def token_mean(mask: Tensor) -> Tensor:
    """Weights of the mean over all tokens of the mini-batch: a long episode counts more than a short one."""
    return mask / mask.sum().clamp(min=1)


def episode_mean(mask: Tensor) -> Tensor:
    """Weights of the mean over each episode's tokens, then over the episodes: all episodes count the same."""
    lengths = mask.sum(-1, keepdim=True).clamp(min=1)
    return mask / (lengths * len(mask))


def episode_sum(mask: Tensor, constant: int = 1) -> Tensor:
    """Weights of the sum over each episode's tokens, divided by a constant, then the mean over the episodes."""
    return mask / (constant * len(mask))


def token_sums(metrics: dict[str, Tensor], off_policy: Tensor | None = None) -> Sums:
    """Returns the sum of each metric [N] over the tokens of its kind.

    `off_policy` [N] bool tells which tokens are off-policy. If it is None, all tokens are of one kind, on-policy or
    guided, and each metric is summed over all of them.
    """
    if off_policy is None:
        return {name: x.detach().sum() for name, x in metrics.items()}
    sums: Sums = {}
    for name, x in metrics.items():
        mask = off_policy if name.startswith(OFF_POLICY) else ~off_policy
        sums[name] = (x.detach() * mask).sum()
    return sums


def sum_by_name(parts: list[Sums]) -> Sums:
    """Returns, for each name, the sum of its values in all parts, added in the order of the parts."""
    totals: Sums = {}
    for part in parts:
        for name, x in part.items():
            totals[name] = totals.get(name, 0.0) + x
    return totals


def means_of(sums: Sums) -> dict[str, float]:
    """Returns the mean of each metric: its sum divided by the number of tokens of its kind, both from `sums`."""
    means = {}
    for name, total in sums.items():
        count_name = _kind(name) + TOKENS
        if name != count_name:  # a number of tokens is not a metric
            means[name] = float(total) / sums[count_name]
    return means


def _kind(name: str) -> str:
    """Returns the prefix of a metric's name: OFF_POLICY, GUIDED or ""; see the top of this file."""
    for kind in (OFF_POLICY, GUIDED):
        if name.startswith(kind):
            return kind
    return ""


def sampling_metrics(log_ratios: list[Tensor], clip_low: float, clip_high: float) -> dict[str, float]:
    """Measures how far the trainer's probabilities are from the sampler's, and how many ratios leave the clip range.

    `log_ratios` has a tensor [2, N] for each mini-batch of the first epoch. Row 0 is the current log-probability minus
    the one that the sampler recorded. Row 1 is the log of the ratio that the algorithm clips. The metrics are:

    - sampling_logp_difference (TRL's name): mean and maximum of |row 0| in the first mini-batch. Its losses are
      computed before the first optimizer step, when the weights are still those of the sampler, so the differences are
      only rounding. (With --max-staleness 1 the sampler may have had the weights of the previous round: then they may
      be larger.)
    - outside_clip_first_epoch: the share of the epoch's tokens whose ratio is outside the clip range, whatever their
      advantages.

    A metric that would be over no tokens is left out.
    """
    metrics = {}
    sampler_log_ratios = log_ratios[0][0]  # of the first mini-batch
    difference = sampler_log_ratios.abs()
    if len(difference):
        metrics["sampling/sampling_logp_difference/mean"] = float(difference.mean())
        metrics["sampling/sampling_logp_difference/max"] = float(difference.max())
    log_ratios_to_clip = torch.cat(log_ratios, dim=1)[1]  # [N] for all tokens of the epoch
    ratio = log_ratios_to_clip.exp()
    outside = (ratio < 1 - clip_low) | (ratio > 1 + clip_high)
    if len(outside):
        metrics["sampling/outside_clip_first_epoch"] = float(outside.float().mean())
    return metrics
