"""Activation checkpointing (arXiv 1604.06174): each layer's input is kept, and the layer run again in backward.

The second run is made by hand rather than by torch.utils.checkpoint, so that the two halves of a layer are never held
together: the feed-forward half goes first, a tile of tokens at a time, then the attention.
"""

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from r3lite.core.grant import Grant, Memory
from r3lite.models.attention import AttentionContext
from r3lite.models.causal_lm import CausalLM, Layer
from r3lite.models.lora import Switch, switch_of
from r3lite.models.offload import Offload
from r3lite.models.streaming import LayerStream


def enable(model: CausalLM, grant: Grant) -> None:
    """Has the model's layers run as the figures of `grant.memory` say, which may change between passes.

    A pass with gradients keeps only the input of each of the first `recompute_layers` layers. The layers after them
    keep their activations: the backward pass frees these before it runs any layer again. An MLP whose activations are
    not kept is computed `mlp_tile` tokens at a time, in passes without gradients too. With `offload`, the kept inputs
    wait in the host's memory.
    """
    # The switch rather than the model: a model that refers to itself is freed late.
    runner = _LayerRunner(
        grant,
        switch=switch_of(model),
        device=model.head_weight.device,
        stream=model.layer_stream,
    )
    model.run_layer = runner.run


class _LayerRunner:
    """Runs layers by the figures that are granted when each of them is run."""

    def __init__(
        self,
        grant: Grant,
        switch: Switch,
        device: torch.device,
        stream: LayerStream | None,
    ):
        self.grant = grant
        self.switch = switch
        self.device = device
        self.stream = stream
        self.host: Offload | None = None
        self.offloads_for: Memory | None = None  # the figures for which `host` was made

    def run(
        self,
        layer: Layer,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        context: AttentionContext,
    ) -> Tensor:
        """Returns a layer's output [B, T, C]."""
        memory = self.grant.memory
        if self.stream:
            self.stream.in_forward(layer.layer_idx)
        if torch.is_grad_enabled() and layer.layer_idx < memory.recompute_layers:
            if not x.requires_grad:
                # With a frozen base the first layer's input requires no gradient, and autograd would skip the layer.
                x.requires_grad_()
            run = _LayerRun(
                layer=layer,
                context=context,
                switch=self.switch,
                tile=memory.mlp_tile,
                host=self._offload(memory),
                stream=self.stream,
            )
            return _Recomputed.apply(x, cos, sin, run)
        assert not (self.stream and torch.is_grad_enabled()), "a streamed layer keeps no activations"
        return layer(x, cos, sin, context=context, tile=memory.mlp_tile)

    def _offload(self, memory: Memory) -> Offload | None:
        if not memory.offload:
            return None
        # New figures get a new stack: if memory ran out in a pass, the old one still holds the inputs of that pass.
        if self.host is None or self.offloads_for is not memory:
            self.host = Offload(self.device)
            self.offloads_for = memory
        return self.host


@dataclass(frozen=True)
class _LayerRun:
    """The inputs, other than tensors, of both runs of a layer."""

    layer: Layer
    context: AttentionContext
    switch: Switch
    tile: int
    host: Offload | None
    stream: LayerStream | None


class _Recomputed(torch.autograd.Function):
    """One layer that keeps only its input. `backward` runs it again and adds to its trainable parameters' gradients."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        run: _LayerRun,
    ) -> Tensor:
        ctx.run = run
        # `backward` may be called when another adapter is on: the second run must use the one of the first.
        ctx.adapter = run.switch.active
        device_type = x.device.type
        ctx.autocast = torch.autocast(
            device_type,
            dtype=torch.get_autocast_dtype(device_type),
            enabled=torch.is_autocast_enabled(device_type),
        )
        drops = run.layer.training and ctx.adapter is not None and run.switch.configs[ctx.adapter].dropout > 0
        ctx.random = _random_state(x.device) if drops else None
        if run.host is None:
            ctx.save_for_backward(cos, sin, x)
        else:
            ctx.save_for_backward(cos, sin)
            run.host.put(x)
        return run.layer(x, cos, sin, context=run.context, tile=run.tile)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        run = ctx.run
        if run.stream:
            run.stream.in_backward(run.layer.layer_idx)
        if run.host is None:
            cos, sin, x = ctx.saved_tensors
        else:
            cos, sin = ctx.saved_tensors
            x = run.host.take()
        x = x.detach().requires_grad_()
        random = contextlib.nullcontext() if ctx.random is None else _replayed(*ctx.random)
        with torch.enable_grad(), ctx.autocast, run.switch.to(ctx.adapter), random:
            middle = run.layer.first_half(x, cos, sin, context=run.context)  # [B, T, C]
            grad = _second_half_backward(run.layer, middle.detach(), grad=grad, tile=run.tile)
        middle.backward(grad)
        return x.grad, None, None, None


def _second_half_backward(
    layer: Layer,
    x: Tensor,
    grad: Tensor,
    tile: int,
) -> Tensor:
    """Runs a layer's second half for x [B, T, C], forward and backward, `tile` tokens at a time.

    Returns the gradient [B, T, C] with respect to x; `grad` [B, T, C] is the gradient with respect to the output. Adds
    to the gradients of the trainable parameters.
    """
    grad_x = torch.empty_like(grad)
    x_tiles = x.flatten(0, 1).split(tile)  # of [B T, C]
    grad_tiles = grad.flatten(0, 1).split(tile)
    grad_x_tiles = grad_x.flatten(0, 1).split(tile)
    for x_tile, grad_tile, grad_x_tile in zip(x_tiles, grad_tiles, grad_x_tiles, strict=True):
        x_tile = x_tile.detach().requires_grad_()
        layer.second_half(x_tile).backward(grad_tile)
        grad_x_tile.copy_(x_tile.grad)
    return grad_x


def _random_state(device: torch.device) -> tuple[torch.device, Tensor, Tensor | None]:
    """Returns the device, and the states of PyTorch's generators of the CPU and of CUDA, as `_replayed` takes them."""
    cuda_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return device, torch.get_rng_state(), cuda_state


@contextlib.contextmanager
def _replayed(
    device: torch.device,
    cpu: Tensor,
    cuda: Tensor | None,
):
    """Within the `with` block PyTorch's generators start from the given states; afterwards they are as before it."""
    with torch.random.fork_rng([] if cuda is None else [device]):
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
        yield
