"""Layer functions that keep for the backward pass no more than they were given: norm, gated activations, rotary
positions, short convolutions.

Autograd by itself keeps or makes several copies of each one's input, in fp32 for the norm.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# The norm is an operator of its own with two implementations: PyTorch calls the one for the tensor's device. On CUDA it
# uses a fused kernel for the forward pass and one for the backward pass. On other devices it is a dozen operations, for
# which autograd would keep too much.
OPERATORS = torch.library.Library("r3lite", "DEF")
OPERATORS.define("rms_norm(Tensor x, Tensor weight, float eps, float offset=0.) -> (Tensor, Tensor)")
OPERATORS.define(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor scale, bool trains, float offset=0.)"
    " -> (Tensor, Tensor)"
)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
) -> Tensor:
    """Returns the root-mean-square norm (arXiv 1910.07467) of x [..., C] with weight [C], computed in fp32.

    Residual activations of Qwen2.5 reach about 8,000; their squares do not fit in fp16. The `offset` is added to the
    weight in fp32: in Gemma it is 1, and weights lie around 0, where 16 bits have finer steps.
    """
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x, weight, eps, offset)
    return torch.ops.r3lite.rms_norm(x, weight, eps, offset)[0]


def swiglu(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) * up (arXiv 2002.05202) [..., W] of gate and up, side by side [..., 2 W]."""
    return _gated(gate_up, SILU)


def geglu(gate_up: Tensor) -> Tensor:
    """Returns gelu(gate) * up (arXiv 2002.05202) [..., W] of gate and up [..., 2 W], gelu by its tanh approximation."""
    return _gated(gate_up, GELU)


def rotate_(
    x: Tensor,
    heads: int,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """Rotates in place the first `heads` heads of x [B, T, all heads, D] by their positions (arXiv 2104.09864).

    `cos` and `sin` [B, T, 1, D] are those of `rotary.rotary_angles`. If they have fewer numbers than a head, only as
    many numbers at the head's beginning are rotated. Returns x.
    """
    if torch.is_grad_enabled():
        return _Rotated.apply(x, heads, cos, sin)
    return _rotate_(x, heads=heads, cos=cos, sin=sin)


def causal_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Returns y [..., T, C] with y_t = sum_k weight_k x_(t + k), for each of the C channels by itself.

    x [..., taps - 1 + T, C] begins with the values before the first of the T tokens; the weight is [C, taps].
    """
    weight = weight.to(x.dtype)
    if torch.is_grad_enabled():
        return _Convolution.apply(x, weight)
    return _convolve(x, weight)


def plain_rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Returns the norm of x in its dtype, and 1 / rms(x) [..., 1] in fp32."""
    x_fp32 = x.float()
    scale = torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + eps)
    if offset:
        return (x_fp32 * scale).mul_(weight.float() + offset).to(x.dtype), scale
    return (x_fp32 * scale).to(x.dtype) * weight, scale


def _norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    trains: bool,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Returns the gradients with respect to x and to the weight; unless the weight `trains`, the second is empty."""
    x_fp32 = x.clone() if x.dtype == torch.float32 else x.float()  # x itself must stay: another backward may read it
    normalized = x_fp32.mul_(scale)
    grad_weight = weight.new_empty(0)
    if trains:
        grad_weight = (grad.float() * normalized).flatten(0, -2).sum(0)
        grad_weight = grad_weight.to(weight.dtype)
    factor = weight.float()
    if offset:
        factor = factor + offset
    grad = grad.float() * factor
    along = torch.linalg.vecdot(grad, normalized)[..., None] / x.shape[-1]  # [..., 1]
    grad_x = grad.sub_(normalized.mul_(along)).mul_(scale)
    return grad_x.to(x.dtype), grad_weight


def _norm_cuda(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    if offset:  # the kernel takes weights in x's dtype only, in which the sum would be rounded
        normalized, scale = torch.ops.aten._fused_rms_norm(x, x.shape[-1:], None, eps)
        return _times_shifted(normalized, weight, offset), scale
    return torch.ops.aten._fused_rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps)


def _times_shifted(
    x: Tensor,
    weight: Tensor,
    offset: float,
) -> Tensor:
    """Returns x (offset + weight), rounded once to x's dtype."""
    assert offset == 1, "one kernel computes x + x weight"
    return torch.addcmul(x, x, weight.to(x.dtype))


def _norm_backward_cuda(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    trains: bool,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    if offset:
        grad_weight = weight.new_empty(0)
        if trains:
            normalized = x.float() * scale
            grad_weight = (grad.float() * normalized).flatten(0, -2).sum(0).to(weight.dtype)
        grad = _times_shifted(grad.contiguous(), weight, offset)
        grad_x, _ = torch.ops.aten._fused_rms_norm_backward(grad, x, x.shape[-1:], scale, None, [True, False])
        return grad_x, grad_weight
    grad_x, grad_weight = torch.ops.aten._fused_rms_norm_backward(
        grad.contiguous(),
        x,
        x.shape[-1:],
        scale,
        weight.to(x.dtype),
        [True, trains],
    )
    if not trains:
        return grad_x, weight.new_empty(0)
    return grad_x, grad_weight.to(weight.dtype)


ANY_DEVICE = "CompositeExplicitAutograd"
OPERATORS.impl("rms_norm", plain_rms_norm, ANY_DEVICE)
OPERATORS.impl("rms_norm_backward", _norm_backward, ANY_DEVICE)
OPERATORS.impl("rms_norm", _norm_cuda, "CUDA")
OPERATORS.impl("rms_norm_backward", _norm_backward_cuda, "CUDA")


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        eps: float,
        offset: float,
    ) -> Tensor:
        out, scale = torch.ops.r3lite.rms_norm(x, weight, eps, offset)
        ctx.save_for_backward(x, weight, scale)
        ctx.offset = offset
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        trains = ctx.needs_input_grad[1]  # not in a frozen base; checkpoints/make_tiny.py trains all weights
        x, weight, scale = ctx.saved_tensors
        grad_x, grad_weight = torch.ops.r3lite.rms_norm_backward(grad, x, weight, scale, trains, ctx.offset)
        if not trains:
            return grad_x, None, None, None
        return grad_x, grad_weight, None, None


class _Activation(NamedTuple):
    """The activation of a gate: `of` returns a new tensor, `write` and `write_backward` write to an existing one."""

    of: Callable[[Tensor], Tensor]
    write: Callable[..., Tensor]  # (gate, out=)
    write_backward: Callable[..., Tensor]  # (grad, gate, grad_input=)


aten = torch.ops.aten
SILU = _Activation(
    of=F.silu,
    write=aten.silu.out,
    write_backward=aten.silu_backward.grad_input,
)
GELU = _Activation(
    of=partial(F.gelu, approximate="tanh"),
    write=partial(aten.gelu.out, approximate="tanh"),
    write_backward=partial(aten.gelu_backward.grad_input, approximate="tanh"),
)


def _gated(gate_up: Tensor, activation: _Activation) -> Tensor:
    if torch.is_grad_enabled():
        return _Gated.apply(gate_up, activation)
    return _product(gate_up, activation)


def _product(gate_up: Tensor, activation: _Activation) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return activation.of(gate).mul_(up)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up: Tensor, activation: _Activation) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.activation = activation
        return _product(gate_up, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grads = torch.empty_like(gate_up)
        grad_gate, grad_up = grads.chunk(2, dim=-1)
        torch.mul(grad, up, out=grad_gate)
        ctx.activation.write_backward(grad_gate, gate, grad_input=grad_gate)
        ctx.activation.write(gate, out=grad_up).mul_(grad)
        return grads, None


def _rotate_(
    x: Tensor,
    heads: int,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    turned = x[:, :, :heads, : cos.shape[-1]]  # [B, T, heads, D]
    first, second = turned.chunk(2, dim=-1)
    across = torch.cat((second, first), dim=-1)
    turned.mul_(cos).addcmul_(across, sin)
    return x


class _Rotated(torch.autograd.Function):
    """Rotation in place, which loses nothing: a rotation is undone by the opposite one."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        heads: int,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        ctx.mark_dirty(x)
        return _rotate_(x, heads=heads, cos=cos, sin=sin)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        grad_x = _rotate_(grad.clone(), heads=ctx.heads, cos=cos, sin=-sin)
        return grad_x, None, None, None


def _convolve(x: Tensor, weight: Tensor) -> Tensor:
    taps = weight.shape[1]
    T = x.shape[-2] - taps + 1
    out = x[..., :T, :] * weight[:, 0]
    for tap in range(1, taps):
        out.addcmul_(x[..., tap : tap + T, :], weight[:, tap])
    return out


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        trains = ctx.needs_input_grad[1]
        ctx.save_for_backward(weight, x if trains else None)
        return _convolve(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        weight, x = ctx.saved_tensors
        taps = weight.shape[1]
        T = grad.shape[-2]
        grad_x = grad.new_zeros(*grad.shape[:-2], taps - 1 + T, grad.shape[-1])
        for tap in range(taps):
            grad_x[..., tap : tap + T, :].addcmul_(grad, weight[:, tap])
        if x is None:
            return grad_x, None
        grad_weight = torch.empty_like(weight)
        for tap in range(taps):
            products = x[..., tap : tap + T, :] * grad
            grad_weight[:, tap] = products.flatten(0, -2).sum(0)
        return grad_x, grad_weight
