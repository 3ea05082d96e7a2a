"""Log-probabilities of given tokens over a large vocabulary, and losses of them, without the logits.

A row of fp32 logits of Qwen2.5 takes 594 KiB. So the head is applied to a chunk of rows at a time, in the head's
dtype, and softmax, entropy and gradient are computed in fp32 for a few of these rows at a time, which fit in the cache
of the processor; the gradient overwrites the logits. Knows nothing of models: it is handed hidden states and the
head's weight, which is frozen.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from r3lite.models.linear import linear

CHUNK = 128  # rows of logits that exist at a time
# A row's gradient has this size when it is multiplied in the head's dtype: fp16 has no numbers below 6e-8, and the
# gradient of one token of a large batch is often smaller.
UNIT = 1024.0
SMALLEST_SIZE = torch.finfo(torch.float32).tiny * UNIT  # of a row's gradient, so that 1 / size is finite
HEAD_ROWS = 8192  # rows of the head whose gradient is computed at a time

M = TypeVar("M")  # what a loss measures beside its value, such as metrics; detached
CandidatesLoss = Callable[[slice, Tensor], tuple[Tensor, M]]
"""Rows, and their log-probabilities [n, k] of k tokens each -> the loss they add, a scalar, and its measurements."""
Loss = Callable[[slice, Tensor, Tensor | None], tuple[Tensor, M]]
"""Rows, their log-probabilities [n] and entropies [n] -> the loss they add, a scalar, and its measurements."""


@torch.no_grad()
def token_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    chunk: int = CHUNK,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Returns log p(target) [N] of hidden states [N, C] under softmax(hidden @ head_weight.T / temperature).

    `targets` is [N]. The head is [V, C]; pass only its first rows if ids beyond the tokenizer must have no probability.
    Logits are computed in the head's dtype, as in the sampler, and normalized in fp32. With `with_entropy`, also
    returns the entropy [N] in nats, else None. Both are fp32 and have no gradients: see `token_loss`.
    """
    if len(targets) == 0:
        empty = hidden.new_zeros(0, dtype=torch.float32)
        return empty, empty if with_entropy else None
    parts = []
    for rows in _chunks(len(targets), chunk):
        # A chunk's logits have no name here: they must be freed before the next chunk's are computed.
        part = _statistics(
            _logits(hidden[rows], head_weight), targets[rows], temperature=temperature, with_entropy=with_entropy
        )
        parts.append(part)
    return _joined(parts)


def token_loss(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    loss: Loss[M],
    temperature: float = 1.0,
    chunk: int = CHUNK,
    with_entropy: bool = False,
    head_grad: Tensor | None = None,
) -> tuple[Tensor, list[M]]:
    """Returns the sum over chunks of `loss(rows, logprobs, entropies)`, a scalar, and what it measures of each chunk.

    Arguments are as in `token_logprobs`. The loss's gradient with respect to a chunk's log-probabilities is known as
    soon as these are. So the gradient with respect to `hidden` is computed in the forward pass, and the logits are
    computed once; only for a loss that depends on the entropies they are computed twice. `head_grad` (fp32 [V, C],
    zeros), if it is given, holds the gradient of the head after the backward pass, but only for a loss that does not
    depend on the entropies.
    """
    trains = torch.is_grad_enabled() and hidden.requires_grad

    def loss_of_chunk(rows: slice) -> tuple[Tensor, M, Tensor | None]:
        logits = _logits(hidden[rows], head_weight)
        logprobs, entropies = _statistics(
            logits, targets[rows], temperature=temperature, with_entropy=with_entropy, to_gradients=trains
        )
        if not trains:
            value, measured = loss(rows, logprobs, entropies)
            return value, measured, None
        with torch.enable_grad():
            inputs = [logprobs.requires_grad_()]
            if entropies is not None:
                inputs.append(entropies.requires_grad_())
            value, measured = loss(rows, logprobs, entropies)
        grad_logprobs, *grad_entropies = torch.autograd.grad(value, inputs, allow_unused=True)
        value = value.detach()
        depends_on_entropies = bool(grad_entropies) and grad_entropies[0] is not None
        if depends_on_entropies:
            del logits  # before they are computed again
            grad_hidden = _grad_hidden(
                hidden[rows],
                head_weight,
                targets[rows],
                entropies=entropies,
                grad_logprobs=grad_logprobs,
                grad_entropies=grad_entropies[0],
                temperature=temperature,
            )
            return value, measured, grad_hidden
        scale = grad_logprobs / (-_unit(logits.dtype) * temperature)
        if head_grad is not None:
            scaled_hidden = (hidden[rows] * scale[:, None]).to(logits.dtype)
            for head_rows in _chunks(logits.shape[1], HEAD_ROWS):
                head_grad[head_rows] += logits[:, head_rows].t() @ scaled_hidden
        grad_hidden = linear(logits, head_weight.t()).float() * scale[:, None]
        return value, measured, grad_hidden

    return _Loss.apply(hidden, head_weight, len(targets), chunk, loss_of_chunk, trains, head_grad)


def cross_entropy(
    rows: slice,
    logprobs: Tensor,
    entropies: Tensor | None,
) -> tuple[Tensor, None]:
    """The `Loss` of supervised fine-tuning: -log p(target), summed over the rows; it measures nothing else."""
    return -logprobs.sum(), None


# The temperature of a teacher's probabilities and of the policy's that are compared with them, whatever temperature
# answers are sampled at. Models that agree at one temperature agree at all, and the probabilities of a few tokens at
# one temperature do not tell those at another.
TEACHER_TEMPERATURE = 1.0


@dataclass(frozen=True)
class TopTokens:
    """The k likeliest tokens of each of N distributions, the likeliest first, at TEACHER_TEMPERATURE."""

    ids: Tensor  # [N, k] int32
    logprobs: Tensor  # [N, k] fp32

    def split(self, sizes: list[int]) -> "list[TopTokens]":
        """Returns the distributions in parts; `sizes` has the number of distributions of each part."""
        ids_parts = self.ids.split(sizes)
        logprobs_parts = self.logprobs.split(sizes)
        return [TopTokens(ids, logprobs) for ids, logprobs in zip(ids_parts, logprobs_parts, strict=True)]


@torch.no_grad()
def top_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    k: int,
    chunk: int = CHUNK,
) -> TopTokens:
    """Returns the k likeliest tokens under softmax(hidden @ head_weight.T), hidden [N, C]."""
    ids = []
    logprobs = []
    for rows in _chunks(len(hidden), chunk):
        logits = _logits(hidden[rows], head_weight)
        for tile in logits.split(tile_rows(logits.device.type)):
            top = _log_softmax(tile, TEACHER_TEMPERATURE).topk(k)
            ids.append(top.indices.int())
            logprobs.append(top.values)
        del logits  # before the next chunk's are computed
    return TopTokens(torch.cat(ids), torch.cat(logprobs))


def candidates_loss(
    hidden: Tensor,
    head_weight: Tensor,
    candidates: Tensor,
    loss: CandidatesLoss[M],
    temperature: float = 1.0,
    chunk: int = CHUNK,
) -> tuple[Tensor, list[M]]:
    """Computes a loss as `token_loss` does, but from the log-probabilities of k tokens in each row.

    Returns the sum over chunks of `loss(rows, logprobs)`, and what it measures of each chunk. `candidates` [N, k] are
    the ids of the tokens, all different within a row; they may be in host memory. The head is applied once. The
    gradient with respect to `hidden` is computed in the forward pass.
    """

    def loss_of_chunk(rows: slice) -> tuple[Tensor, M, Tensor]:
        logits = _logits(hidden[rows], head_weight)
        ids = candidates[rows].to(hidden.device, torch.long, non_blocking=True)  # [n, k]
        tiles = list(_chunks(len(logits), tile_rows(logits.device.type)))
        logprobs = torch.cat([_log_softmax(logits[tile], temperature).gather(-1, ids[tile]) for tile in tiles])
        with torch.enable_grad():
            value, measured = loss(rows, logprobs.requires_grad_())
        (grad,) = torch.autograd.grad(value, logprobs)  # [n, k]
        # With p = softmax(logits / T) and g_j = dL/dlog p(j): dL/dlogit_v = (g_v - p_v sum_j g_j) / T.
        unit = _unit(logits.dtype) / grad.abs().sum(-1).clamp(min=SMALLEST_SIZE)  # [n]
        grad = grad * unit[:, None]
        for tile in tiles:
            grad_logits = _log_softmax(logits[tile], temperature).exp_()  # [w, V], the probabilities at first
            grad_logits.mul_(-grad[tile].sum(-1, keepdim=True))
            grad_logits.scatter_add_(-1, ids[tile], grad[tile])
            logits[tile] = grad_logits
        grad_hidden = linear(logits, head_weight.t()).float() / (unit * temperature)[:, None]
        return value.detach(), measured, grad_hidden

    return _Loss.apply(hidden, head_weight, len(candidates), chunk, loss_of_chunk, True, None)


def tile_rows(device_type: str) -> int:
    """Returns the number of rows of a tile, the part of a chunk that is in fp32 at a time.

    A tile fits in a CPU's cache, or is enough work to fill a GPU.
    """
    return 8 if device_type == "cpu" else 32


class _Loss(torch.autograd.Function):
    """Sums a loss over chunks of rows.

    `loss_of_chunk` returns the loss of a chunk, what it measures and, if `trains`, the gradient [n, C] with respect to
    the chunk's hidden states.
    """

    @staticmethod
    def forward(
        ctx,
        hidden,
        head_weight,
        count,
        chunk,
        loss_of_chunk,
        trains,
        head_grad,
    ):
        assert not head_weight.requires_grad, "the head is frozen"
        grad_hidden = None
        if trains:
            grad_hidden = torch.empty(hidden.shape, dtype=torch.float32, device=hidden.device)
        total = torch.zeros((), device=hidden.device)
        measured = []
        for rows in _chunks(count, chunk):
            value, measured_of_chunk, chunk_grad = loss_of_chunk(rows)
            total += value
            measured.append(measured_of_chunk)
            if trains:
                grad_hidden[rows] = chunk_grad
        ctx.save_for_backward(grad_hidden)
        ctx.dtype = hidden.dtype
        ctx.head_grad = head_grad
        return total, measured

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_total, _):
        (grad_hidden,) = ctx.saved_tensors
        if ctx.head_grad is not None:
            ctx.head_grad.mul_(grad_total)
        grad_hidden = (grad_hidden * grad_total).to(ctx.dtype)
        return grad_hidden, None, None, None, None, None, None


def _chunks(count: int, size: int) -> Iterator[slice]:
    """Yields slices of at most `size` rows that together cover `count` rows."""
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _logits(hidden: Tensor, head_weight: Tensor) -> Tensor:
    """Returns the logits [n, V] of a chunk, hidden [n, C], in the head's dtype."""
    return linear(hidden.to(head_weight.dtype), head_weight)


def _unit(dtype: torch.dtype) -> float:
    """Returns the size that a row's gradient is given before it is multiplied in `dtype`."""
    return 1.0 if dtype == torch.float32 else UNIT


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Returns log-probabilities [w, V] in fp32 of a few rows of logits divided by the temperature."""
    scaled = logits.float()
    if temperature != 1:
        scaled = scaled / temperature
    return torch.log_softmax(scaled, dim=-1)


def _statistics(
    logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool, to_gradients: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Returns the log-probabilities [n] of the targets, and entropies [n] or None, of logits [n, V].

    With `to_gradients` each row of logits is overwritten with the gradient of -log p(target) with respect to
    logits / temperature, which is p_v - [v = target], times `_unit(dtype)`. The gradient of any loss of log p(target)
    is this gradient times one number a row. So it can be written before the loss is known.
    """
    parts = []
    tile_size = tile_rows(logits.device.type)
    for tile, tile_targets in zip(logits.split(tile_size), targets[:, None].split(tile_size)):
        logprobs = _log_softmax(tile, temperature)  # [w, V]
        target_logprobs = logprobs.gather(-1, tile_targets)[:, 0]
        entropies = None
        in_place = to_gradients and tile.dtype == logprobs.dtype
        if with_entropy or to_gradients:
            if in_place:
                probs = torch.exp(logprobs, out=tile)
            elif with_entropy:
                probs = torch.exp(logprobs)
            else:
                probs = torch.exp(logprobs, out=logprobs)
        if with_entropy:
            # Not log Z - sum_v p_v logit_v: if logits are large, a small entropy is lost in that difference.
            with torch.autocast(logits.device.type, enabled=False):  # which would compute the product in 16 bits
                entropies = torch.linalg.vecdot(probs, logprobs).neg_()
        if to_gradients:
            probs.scatter_add_(-1, tile_targets, torch.full_like(tile_targets, -1, dtype=probs.dtype))
            if not in_place:
                torch.mul(probs, UNIT, out=tile)
        parts.append((target_logprobs, entropies))
    return _joined(parts)


def _joined(parts: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Joins the results of `_statistics` for several groups of rows."""
    logprobs, entropies = zip(*parts, strict=True)
    if entropies[0] is None:
        return torch.cat(logprobs), None
    return torch.cat(logprobs), torch.cat(entropies)


def _grad_hidden(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    entropies: Tensor,
    grad_logprobs: Tensor,
    grad_entropies: Tensor,
    temperature: float,
) -> Tensor:
    """Returns the gradient [n, C], fp32, with respect to a chunk's hidden states [n, C].

    The logits are computed again. With p = softmax(logits / T), g and h the gradients with respect to log p(target) and
    to the entropy H: dL/dlogit_v = (g ([v = target] - p_v) - h p_v (log p_v + H)) / T.
    """
    logits = _logits(hidden, head_weight)
    size = grad_logprobs.abs() + grad_entropies.abs()  # [n]
    unit = _unit(logits.dtype) / size.clamp(min=SMALLEST_SIZE)
    g = (grad_logprobs * unit)[:, None]  # [n, 1]
    h = (grad_entropies * unit)[:, None]
    for tile in _chunks(len(logits), tile_rows(logits.device.type)):
        logprobs = _log_softmax(logits[tile], temperature)  # [w, V]
        probs = logprobs.exp()
        grad_logits = logprobs.add_(entropies[tile, None]).mul_(h[tile])  # in place of the log-probabilities
        grad_logits.add_(g[tile]).mul_(probs).neg_()
        grad_logits.scatter_add_(-1, targets[tile, None], g[tile])
        logits[tile] = grad_logits
    return linear(logits, head_weight.t()).float() / (unit * temperature)[:, None]
