"""Log-probabilities of chosen tokens over a large vocabulary, without keeping the logits.

A row of fp32 logits of Qwen2.5 takes 594 KiB, so the head is applied to a few rows at a time and, for the backward
pass, applied again. Knows nothing of models: it is handed hidden states and the head's weight.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def token_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    chunk: int = 128,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log p(target) [N] of hidden states [N, C] under softmax(hidden @ head_weight.T / temperature), targets [N].

    The head is [V, C]; its first rows alone may be given, so that ids beyond the tokenizer have no probability.
    Logits are made in the head's dtype, as the sampler makes them, and normalized in fp32. With `with_entropy`, also
    the entropy [N] in nats. Both are fp32 and differentiable; at most `chunk` rows of logits exist at a time.
    """
    logprobs, entropies = [], []
    for start in range(0, max(len(targets), 1), chunk):
        rows = slice(start, start + chunk)
        inputs = (hidden[rows], head_weight, targets[rows], temperature, with_entropy)
        if torch.is_grad_enabled():
            logprob, entropy = checkpoint(_chunk, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            logprob, entropy = _chunk(*inputs)
        logprobs.append(logprob)
        entropies.append(entropy)
    return torch.cat(logprobs), torch.cat(entropies) if with_entropy else None


def _chunk(
    hidden: Tensor, head_weight: Tensor, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities [n] and entropies [n] of a few rows, hidden [n, C]."""
    logits = F.linear(hidden.to(head_weight.dtype), head_weight).float() / temperature  # [n, V]
    log_z = logits.logsumexp(-1)  # [n]
    logprob = logits.gather(-1, targets[:, None])[:, 0] - log_z  # [n]
    if not with_entropy:
        return logprob, None
    # Not log Z - sum_v p_v logit_v: with large logits the difference of the two loses a small entropy.
    logprobs = logits - log_z[:, None]  # [n, V]
    return logprob, -(logprobs.exp() * logprobs).sum(-1)
