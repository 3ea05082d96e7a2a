"""Log-probabilities of chosen tokens over a large vocabulary, and losses of them, without the logits.

A row of fp32 logits of Qwen2.5 takes 594 KiB. So the head is applied to a chunk of rows at a time, in the head's
dtype, and softmax, entropy and gradient are computed in fp32 for a few of these rows at a time, in the cache of the
processor; the gradient takes the place of the logits. Knows nothing of models: it is handed hidden states and the
head's weight, which is frozen.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 128  # rows of logits that exist at a time
# What a row's gradient is brought to before it is multiplied in the head's dtype: fp16 has no numbers below 6e-8, and
# a token's share of a loss is soon less.
UNIT = 1024.0

Loss = Callable[[slice, Tensor, Tensor | None], Tensor]
"""Rows, their log-probabilities [n] and entropies [n] -> the loss that they add, a scalar."""


def token_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    chunk: int = CHUNK,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log p(target) [N] of hidden states [N, C] under softmax(hidden @ head_weight.T / temperature), targets [N].

    The head is [V, C]; its first rows alone may be given, so that ids beyond the tokenizer have no probability.
    Logits are made in the head's dtype, as the sampler makes them, and normalized in fp32. With `with_entropy`, also
    the entropy [N] in nats. Both are fp32 and differentiable in `hidden`; the backward pass makes the logits again.
    """
    return _TokenLogprobs.apply(hidden, head_weight, targets, temperature, chunk, with_entropy)


def token_loss(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    loss: Loss,
    temperature: float = 1.0,
    chunk: int = CHUNK,
    with_entropy: bool = False,
) -> Tensor:
    """Sum over chunks of `loss(rows, logprobs, entropies)`, a scalar; what it is handed is as in `token_logprobs`.

    Here the upstream gradient is known as soon as a chunk's log-probabilities are, so the gradient with respect to
    `hidden` is computed in the forward pass and the logits are made once, not twice.
    """
    if torch.is_grad_enabled() and hidden.requires_grad:
        return _TokenLoss.apply(hidden, head_weight, targets, loss, temperature, chunk, with_entropy)
    total = torch.zeros((), device=hidden.device)
    for rows in _chunks(len(targets), chunk):
        logits = _logits(hidden[rows], head_weight)
        logprobs, _, entropies = _statistics(logits, targets[rows], temperature, with_entropy)
        del logits  # before the next chunk's are made
        total += loss(rows, logprobs, entropies)
    return total


def wide_rows(device_type: str) -> int:
    """How many rows of a chunk are in fp32 at a time: on a CPU what its cache holds, else enough to keep it busy."""
    return 8 if device_type == "cpu" else 32


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head_weight, targets, temperature, chunk, with_entropy):
        assert not head_weight.requires_grad, "the head is frozen"
        found = [
            _statistics(_logits(hidden[rows], head_weight), targets[rows], temperature, with_entropy)
            for rows in _chunks(len(targets), chunk)
        ] or [(hidden.new_zeros(0, dtype=torch.float32),) * 3]
        logprobs, log_z, entropies = (None if x[0] is None else torch.cat(x) for x in zip(*found, strict=True))
        ctx.save_for_backward(hidden, head_weight, targets, log_z, entropies if with_entropy else None)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logprobs, entropies if with_entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx, by_logprobs, by_entropies):
        hidden, head_weight, targets, log_z, entropies = ctx.saved_tensors
        grad = torch.empty_like(hidden)
        for rows in _chunks(len(targets), ctx.chunk):
            logits = _logits(hidden[rows], head_weight)
            known = targets[rows], log_z[rows], None if entropies is None else entropies[rows]
            upstream = by_logprobs[rows], None if by_entropies is None else by_entropies[rows]
            grad[rows] = _by_hidden(logits, head_weight, *known, *upstream, ctx.temperature)
            del logits  # before the next chunk's are made
        return grad, None, None, None, None, None


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head_weight, targets, loss, temperature, chunk, with_entropy):
        assert not head_weight.requires_grad, "the head is frozen"
        grad = torch.empty(hidden.shape, dtype=torch.float32, device=hidden.device)
        total = torch.zeros((), device=hidden.device)
        for rows in _chunks(len(targets), chunk):
            logits = _logits(hidden[rows], head_weight)
            logprobs, log_z, entropies = _statistics(logits, targets[rows], temperature, with_entropy)
            value, *upstream = _upstream(loss, rows, logprobs, entropies)
            total += value
            grad[rows] = _by_hidden(logits, head_weight, targets[rows], log_z, entropies, *upstream, temperature)
            del logits  # before the next chunk's are made
        ctx.save_for_backward(grad)
        ctx.dtype = hidden.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        (grad,) = ctx.saved_tensors
        return (grad * upstream).to(ctx.dtype), None, None, None, None, None, None


def _upstream(loss: Loss, rows: slice, logprobs: Tensor, entropies: Tensor | None) -> tuple[Tensor, ...]:
    """A chunk's loss, and its gradients with respect to log-probabilities and entropies [n] (None: 0 everywhere)."""
    with torch.enable_grad():
        inputs = [x.requires_grad_() for x in (logprobs, entropies) if x is not None]
        value = loss(rows, logprobs, entropies)
    by_logprobs, *by_entropies = torch.autograd.grad(value, inputs, allow_unused=True)
    assert by_logprobs is not None, "the loss does not depend on the log-probabilities"
    return value.detach(), by_logprobs, by_entropies[0] if by_entropies else None


def _chunks(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _logits(hidden: Tensor, head_weight: Tensor) -> Tensor:
    """Logits [n, V] of a chunk, hidden [n, C], in the head's dtype."""
    return F.linear(hidden.to(head_weight.dtype), head_weight)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """A copy of a few rows in fp32, divided by the temperature."""
    wide = logits.to(torch.float32, copy=True)
    return wide if temperature == 1 else wide.div_(temperature)


def _statistics(logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool) -> tuple[Tensor, ...]:
    """Log-probabilities [n] of the targets, log Z [n] and entropies [n] (or None), of logits [n, V]."""
    found, size = [], wide_rows(logits.device.type)
    for few, target in zip(logits.split(size), targets.split(size)):
        wide = _scaled(few, temperature)
        log_z = wide.logsumexp(-1, keepdim=True)  # [w, 1]
        logprob, entropy = wide.gather(-1, target[:, None]).sub_(log_z)[:, 0], None
        if with_entropy:
            # Not log Z - sum_v p_v logit_v: with large logits the difference of the two loses a small entropy.
            wide.sub_(log_z)
            entropy = torch.linalg.vecdot(wide.exp(), wide).neg_()
        found.append((logprob, log_z[:, 0], entropy))
    return tuple(None if x[0] is None else torch.cat(x) for x in zip(*found, strict=True))


def _by_hidden(
    logits: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    log_z: Tensor,
    entropies: Tensor | None,
    by_logprobs: Tensor,
    by_entropies: Tensor | None,
    temperature: float,
) -> Tensor:
    """The gradient [n, C], fp32, with respect to a chunk's hidden states; the logits [n, V] are overwritten.

    With p = softmax(logits / T), g and h the upstream gradients of log p(target) and of the entropy H:
    dL/dlogit_v = (g ([v = target] - p_v) - h p_v (log p_v + H)) / T.
    """
    size = by_logprobs.abs() if by_entropies is None else by_logprobs.abs() + by_entropies.abs()  # [n]
    unit = UNIT / size.clamp(min=torch.finfo(torch.float32).tiny * UNIT)
    g = (by_logprobs * unit)[:, None]  # [n, 1]
    h = None if by_entropies is None else (by_entropies * unit)[:, None]
    for few in _chunks(len(logits), wide_rows(logits.device.type)):
        logprobs = _scaled(logits[few], temperature).sub_(log_z[few, None])  # [w, V]
        probs = logprobs.exp()
        if h is None:
            by_logits = probs.mul_(-g[few])
        else:
            by_logits = logprobs.add_(entropies[few, None]).mul_(h[few]).add_(g[few]).mul_(probs).neg_()
        by_logits.scatter_add_(-1, targets[few, None], g[few])
        logits[few] = by_logits
    return (logits @ head_weight).float() / (unit * temperature)[:, None]
