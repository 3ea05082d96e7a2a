"""Activation checkpointing (arXiv 1604.06174): each layer's input is kept, and the layer run again in backward."""

import functools

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from r3lite.models.kv_cache import LayerCache
from r3lite.models.lora import Switch, switch_of
from r3lite.models.qwen2 import Qwen2


def enable(model: Qwen2) -> None:
    """From now on a pass with gradients keeps no layer's activations, in training and evaluation mode alike."""
    # The switch rather than the model: a model that refers to itself is freed late.
    model.run_layer = functools.partial(_run_layer, switch_of(model))


def _run_layer(
    switch: Switch, layer: nn.Module, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: LayerCache | None
) -> Tensor:
    """One layer's output [B, T, C]."""
    if not (torch.is_grad_enabled() and cache is None):
        return layer(x, cos, sin, mask, cache)
    # `backward` may be called when another adapter is on: the second run must use the one of the first.
    name = switch.active
    return checkpoint(
        layer, x, cos, sin, mask, cache,
        use_reentrant=False,
        preserve_rng_state=name is not None and switch.specs[name].dropout > 0,
        context_fn=lambda: (switch.to(name), switch.to(name)),
    )  # fmt: skip
