"""Log-probabilities of chosen tokens over a large vocabulary, and losses of them, without the logits.

A row of fp32 logits of Qwen2.5 takes 594 KiB. So the head is applied to a chunk of rows at a time, in the head's
dtype, and softmax, entropy and gradient are computed in fp32 for a few of these rows at a time, which fit in the cache
of the processor; the gradient overwrites the logits. Knows nothing of models: it is handed hidden states and the
head's weight, which is frozen.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from r3lite.models.linear import linear

CHUNK = 128  # rows of logits that exist at a time
# A row's gradient has this size when it is multiplied in the head's dtype: fp16 has no numbers below 6e-8, and the
# gradient of one token of a large batch is often smaller.
UNIT = 1024.0
HEAD_ROWS = 8192  # of the head, whose gradient is computed at a time

Metrics = dict[str, Tensor]
ChosenLoss = Callable[[slice, Tensor], tuple[Tensor, Metrics]]
"""Rows, and their log-probabilities [n, k] of k tokens each -> the loss they add, a scalar, and its metrics."""
Loss = Callable[[slice, Tensor, Tensor | None], tuple[Tensor, Metrics]]
"""Rows, their log-probabilities [n] and entropies [n] -> the loss they add, a scalar, and its metrics, detached."""


@torch.no_grad()
def token_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    chunk: int = CHUNK,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log p(target) [N] of hidden states [N, C] under softmax(hidden @ head_weight.T / temperature), targets [N].

    The head is [V, C]; pass only its first rows if ids beyond the tokenizer must have no probability. Logits are
    computed in the head's dtype, as in the sampler, and normalized in fp32. With `with_entropy`, also returns the
    entropy [N] in nats, else None. Both are fp32, and without gradients: those are `token_loss`'s.
    """
    parts = [
        _statistics(_logits(hidden[rows], head_weight), targets[rows], temperature, with_entropy)
        for rows in _chunks(len(targets), chunk)
    ] or [(hidden.new_zeros(0, dtype=torch.float32),) * 2]
    logprobs, entropies = (None if x[0] is None else torch.cat(x) for x in zip(*parts, strict=True))
    return logprobs, entropies if with_entropy else None


def token_loss(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    loss: Loss,
    temperature: float = 1.0,
    chunk: int = CHUNK,
    with_entropy: bool = False,
    head_grad: Tensor | None = None,
) -> tuple[Tensor, list[Metrics]]:
    """The sum over chunks of `loss(rows, logprobs, entropies)`, a scalar, and the metrics of each chunk in order.

    Arguments are as in `token_logprobs`. The upstream gradient is known as soon as a chunk's log-probabilities are, so
    the gradient with respect to `hidden` is computed in the forward pass and the logits are computed once, not twice;
    twice only for a loss that depends on the entropies. In the backward pass `head_grad` (fp32 [V, C], zeros), if it is
    given, becomes the gradient of the head, of a loss that does not depend on them.
    """
    trains = torch.is_grad_enabled() and hidden.requires_grad

    def of_chunk(rows: slice) -> tuple[Tensor, Metrics, Tensor | None]:
        logits = _logits(hidden[rows], head_weight)
        found = _statistics(logits, targets[rows], temperature, with_entropy, to_gradients=trains)
        if not trains:
            return *loss(rows, *found), None
        with torch.enable_grad():
            inputs = [x.requires_grad_() for x in found if x is not None]
            value, measured = loss(rows, *found)
        grad_logprobs, *grad_entropies = torch.autograd.grad(value, inputs, allow_unused=True)
        value = value.detach()
        if not grad_entropies or grad_entropies[0] is None:  # the loss does not depend on them
            scale = grad_logprobs / (-_unit(logits.dtype) * temperature)
            if head_grad is not None:
                scaled = (hidden[rows] * scale[:, None]).to(logits.dtype)
                for some in _chunks(logits.shape[1], HEAD_ROWS):
                    head_grad[some] += logits[:, some].t() @ scaled
            return value, measured, linear(logits, head_weight.t()).float() * scale[:, None]
        del logits  # before they are computed again
        grads = grad_logprobs, *grad_entropies
        return value, measured, _grad_hidden(hidden[rows], head_weight, targets[rows], found[1], *grads, temperature)

    return _Loss.apply(hidden, head_weight, len(targets), chunk, of_chunk, trains, head_grad)


def cross_entropy(rows: slice, logprobs: Tensor, entropies: Tensor | None) -> tuple[Tensor, Metrics]:
    """The `Loss` of supervised fine-tuning: -log p(target), summed over the rows; it has no metrics."""
    return -logprobs.sum(), {}


# Of what a teacher says and of the policy that is compared with it, whatever temperature is sampled at: models that say
# the same at one temperature do so at all, and of a few tokens no other temperature's probabilities can be found.
TEACHER_TEMPERATURE = 1.0


@dataclass(frozen=True)
class TopTokens:
    """The k likeliest tokens of each of N distributions, the likeliest first, at TEACHER_TEMPERATURE."""

    ids: Tensor  # [N, k] int32
    logprobs: Tensor  # [N, k] fp32

    def split(self, sizes: list[int]) -> "list[TopTokens]":
        """The same in parts of `sizes` distributions."""
        parts = zip(self.ids.split(sizes), self.logprobs.split(sizes), strict=True)
        return [TopTokens(ids, logprobs) for ids, logprobs in parts]


@torch.no_grad()
def top_logprobs(hidden: Tensor, head_weight: Tensor, k: int, chunk: int = CHUNK) -> TopTokens:
    """The k likeliest tokens under softmax(hidden @ head_weight.T), hidden [N, C]."""
    ids, logprobs = [], []
    for rows in _chunks(len(hidden), chunk):
        logits = _logits(hidden[rows], head_weight)
        for few in logits.split(wide_rows(logits.device.type)):
            values, found = _log_softmax(few, TEACHER_TEMPERATURE).topk(k)
            ids.append(found.int())
            logprobs.append(values)
        del logits  # before the next chunk's are computed
    return TopTokens(torch.cat(ids), torch.cat(logprobs))


def chosen_loss(
    hidden: Tensor,
    head_weight: Tensor,
    chosen: Tensor,
    loss: ChosenLoss,
    temperature: float = 1.0,
    chunk: int = CHUNK,
) -> tuple[Tensor, list[Metrics]]:
    """`token_loss` of k tokens a row: the sum over chunks of `loss(rows, logprobs)`, and the metrics of each chunk.

    `chosen` [N, k] are their ids, different ones in a row; they may be in host memory. The head is applied once; the
    gradient with respect to `hidden` is computed in the forward pass.
    """

    def of_chunk(rows: slice) -> tuple[Tensor, Metrics, Tensor]:
        logits = _logits(hidden[rows], head_weight)
        ids = chosen[rows].to(hidden.device, torch.long, non_blocking=True)  # [n, k]
        few = list(_chunks(len(logits), wide_rows(logits.device.type)))
        logprobs = torch.cat([_log_softmax(logits[w], temperature).gather(-1, ids[w]) for w in few])
        with torch.enable_grad():
            value, measured = loss(rows, logprobs.requires_grad_())
        (grad,) = torch.autograd.grad(value, logprobs)  # [n, k]
        # With p = softmax(logits / T) and g_j the gradient of log p(j): dL/dlogit_v = (g_v - p_v sum_j g_j) / T.
        unit = _unit(logits.dtype) / grad.abs().sum(-1).clamp(min=torch.finfo(torch.float32).tiny * UNIT)  # [n]
        grad = grad * unit[:, None]
        for w in few:
            probs = _log_softmax(logits[w], temperature).exp_()  # [w, V]
            logits[w] = probs.mul_(-grad[w].sum(-1, keepdim=True)).scatter_add_(-1, ids[w], grad[w])
        return value.detach(), measured, linear(logits, head_weight.t()).float() / (unit * temperature)[:, None]

    return _Loss.apply(hidden, head_weight, len(chosen), chunk, of_chunk, True, None)


def wide_rows(device_type: str) -> int:
    """How many rows of a chunk are in fp32 at a time: as many as a CPU's cache holds, or enough to fill a GPU."""
    return 8 if device_type == "cpu" else 32


class _Loss(torch.autograd.Function):
    """The sum of a loss over chunks of rows; `of_chunk` gives its value and metrics and, if it trains, the gradient
    [n, C] with respect to a chunk's hidden states."""

    @staticmethod
    def forward(ctx, hidden, head_weight, count, chunk, of_chunk, trains, head_grad):
        assert not head_weight.requires_grad, "the head is frozen"
        grad_hidden = torch.empty(hidden.shape, dtype=torch.float32, device=hidden.device) if trains else None
        total, metrics = torch.zeros((), device=hidden.device), []
        for rows in _chunks(count, chunk):
            value, measured, grad = of_chunk(rows)
            total += value
            metrics.append(measured)
            if trains:
                grad_hidden[rows] = grad
        ctx.save_for_backward(grad_hidden)
        ctx.dtype, ctx.head_grad = hidden.dtype, head_grad
        return total, metrics

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_total, _):
        (grad_hidden,) = ctx.saved_tensors
        if ctx.head_grad is not None:
            ctx.head_grad.mul_(grad_total)
        return (grad_hidden * grad_total).to(ctx.dtype), None, None, None, None, None, None


def _chunks(count: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` rows that together cover `count` rows."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _logits(hidden: Tensor, head_weight: Tensor) -> Tensor:
    """Logits [n, V] of a chunk, hidden [n, C], in the head's dtype."""
    return linear(hidden.to(head_weight.dtype), head_weight)


def _unit(dtype: torch.dtype) -> float:
    """How large a row's gradient is made before it is multiplied in `dtype`."""
    return 1.0 if dtype == torch.float32 else UNIT


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Log-probabilities [w, V] in fp32 of a few rows of logits divided by the temperature."""
    wide = logits.float() if temperature == 1 else logits.float() / temperature
    return torch.log_softmax(wide, dim=-1)


def _statistics(
    logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool, to_gradients: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities [n] of the targets, and entropies [n] or None, of logits [n, V].

    With `to_gradients` each row of logits becomes the gradient of -log p(target), p_v - [v = target], times
    `_unit(dtype)`. The gradient of any loss of log p(target) is that times a number, so it is made before the loss is.
    """
    parts, size = [], wide_rows(logits.device.type)
    for few, target in zip(logits.split(size), targets[:, None].split(size)):
        logprobs = _log_softmax(few, temperature)  # [w, V]
        logprob, entropy = logprobs.gather(-1, target)[:, 0], None
        in_place = to_gradients and few.dtype == logprobs.dtype
        if with_entropy or to_gradients:
            probs = torch.exp(logprobs, out=few if in_place else None if with_entropy else logprobs)
        if with_entropy:
            # Not log Z - sum_v p_v logit_v: if logits are large, a small entropy is lost in that difference.
            with torch.autocast(logits.device.type, enabled=False):  # which would compute the product in 16 bits
                entropy = torch.linalg.vecdot(probs, logprobs).neg_()
        if to_gradients:
            probs.scatter_add_(-1, target, torch.full_like(target, -1, dtype=probs.dtype))
            if not in_place:
                torch.mul(probs, UNIT, out=few)
        parts.append((logprob, entropy))
    return tuple(None if x[0] is None else torch.cat(x) for x in zip(*parts, strict=True))


def _grad_hidden(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    entropies: Tensor | None,
    grad_logprobs: Tensor,
    grad_entropies: Tensor | None,
    temperature: float,
) -> Tensor:
    """The gradient [n, C], fp32, with respect to a chunk's hidden states [n, C], whose logits are computed again.

    With p = softmax(logits / T), g and h the gradients with respect to log p(target) and to the entropy H:
    dL/dlogit_v = (g ([v = target] - p_v) - h p_v (log p_v + H)) / T.
    """
    logits = _logits(hidden, head_weight)
    size = grad_logprobs.abs() if grad_entropies is None else grad_logprobs.abs() + grad_entropies.abs()  # [n]
    unit = _unit(logits.dtype) / size.clamp(min=torch.finfo(torch.float32).tiny * UNIT)
    g = (grad_logprobs * unit)[:, None]  # [n, 1]
    h = None if grad_entropies is None else (grad_entropies * unit)[:, None]
    for few in _chunks(len(logits), wide_rows(logits.device.type)):
        logprobs = _log_softmax(logits[few], temperature)  # [w, V]
        probs = logprobs.exp()
        if h is None:
            grad_logits = probs.mul_(-g[few])
        else:
            grad_logits = logprobs.add_(entropies[few, None]).mul_(h[few]).add_(g[few]).mul_(probs).neg_()
        grad_logits.scatter_add_(-1, targets[few, None], g[few])
        logits[few] = grad_logits
    return linear(logits, head_weight.t()).float() / (unit * temperature)[:, None]
