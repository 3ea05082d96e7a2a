"""Activation checkpointing (arXiv 1604.06174): each layer's input is kept, and the layer run again in backward.

The second run is made by hand rather than by torch.utils.checkpoint, so that the two halves of a layer are never held
together: the feed-forward half goes first, a tile of tokens at a time where that is asked for, then the attention.
"""

import contextlib
import functools

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from r3lite.models.hooks import require_input_grads
from r3lite.models.lora import Switch, switch_of
from r3lite.models.offload import Offload
from r3lite.models.qwen2 import Layer, Qwen2, Seen


def enable(model: Qwen2, layers: int | None = None, mlp_tile: int | None = None, offload: bool = False) -> None:
    """From now on a pass with gradients keeps only the input of the first `layers` layers (None: of all).

    The last ones are those that keep their activations: theirs are gone before the first layer is run again. With
    `mlp_tile`, the inside of an MLP that keeps nothing exists for that many tokens at a time, in passes without
    gradients too. With `offload`, the kept inputs wait in the host's memory. May be called again with other figures.
    """
    count = len(model.model.layers) if layers is None else layers
    if count and not hasattr(model, "input_grads"):
        model.input_grads = require_input_grads(model)
    for layer in model.model.layers:
        layer.mlp.tile = mlp_tile
    host = Offload(model.head_weight.device) if offload else None
    # The switch rather than the model: a model that refers to itself is freed late.
    model.run_layer = functools.partial(_run_layer, switch_of(model), count, host)


def _run_layer(
    switch: Switch,
    recomputed: int,
    host: Offload | None,
    i: int,
    layer: Layer,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seen: Seen,
) -> Tensor:
    """Layer i's output [B, T, C]."""
    if torch.is_grad_enabled() and i < recomputed:
        return _Recomputed.apply(x, cos, sin, seen, layer, switch, host)
    return layer(x, cos, sin, seen)


class _Recomputed(torch.autograd.Function):
    """One layer that keeps its input. Adapters' gradients are added where they belong while it runs again."""

    @staticmethod
    def forward(
        ctx, x: Tensor, cos: Tensor, sin: Tensor, seen: Seen, layer: Layer, switch: Switch, host: Offload | None
    ) -> Tensor:
        ctx.seen, ctx.layer, ctx.switch, ctx.host = seen, layer, switch, host
        # `backward` may be called when another adapter is on: the second run must use the one of the first.
        ctx.adapter = switch.active
        ctx.autocast = _autocast(x.device.type)
        drops = layer.training and ctx.adapter is not None and switch.configs[ctx.adapter].dropout > 0
        ctx.random = _random_state(x.device) if drops else None
        if host is None:
            ctx.save_for_backward(cos, sin, x)
        else:
            ctx.save_for_backward(cos, sin)
            host.put(x)
        return layer(x, cos, sin, seen)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, *x = ctx.saved_tensors
        x = (x[0] if ctx.host is None else ctx.host.take()).detach().requires_grad_()
        layer, random = ctx.layer, contextlib.nullcontext() if ctx.random is None else _replayed(*ctx.random)
        with torch.enable_grad(), ctx.autocast, ctx.switch.to(ctx.adapter), random:
            middle = layer.attend(x, cos, sin, ctx.seen)  # [B, T, C]
            grad = _feed_forward_backward(layer, middle.detach(), grad)
        middle.backward(grad)
        return x.grad, None, None, None, None, None, None


def _feed_forward_backward(layer: Layer, x: Tensor, grad: Tensor) -> Tensor:
    """Backward through a layer's second half at x [B, T, C]: the gradient with respect to x."""
    tile = layer.mlp.tile or len(x) * x.shape[1]
    by_x = torch.empty_like(grad)
    rows = (t.flatten(0, 1).split(tile) for t in (x, grad, by_x))  # of [B T, C]
    for piece, piece_grad, result in zip(*rows, strict=True):
        piece = piece.detach().requires_grad_()
        layer.feed_forward(piece).backward(piece_grad)
        result.copy_(piece.grad)
    return by_x


def _autocast(device_type: str) -> torch.autocast:
    """The autocast of the present, to be entered again in the backward pass."""
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    return torch.autocast(device_type, dtype, enabled)


def _random_state(device: torch.device) -> tuple[torch.device, Tensor, Tensor | None]:
    return device, torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


@contextlib.contextmanager
def _replayed(device: torch.device, cpu: Tensor, cuda: Tensor | None):
    """PyTorch's generators as they were, and as they are again afterwards."""
    with torch.random.fork_rng([] if cuda is None else [device]):
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
        yield
