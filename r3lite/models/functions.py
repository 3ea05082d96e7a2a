"""Layer functions that keep for the backward pass only what they were given: RMSNorm and SwiGLU.

Left to autograd, each keeps several copies of its input, in fp32 for the norm: a third of a layer's activations.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm (arXiv 1910.07467) of x [..., C] with weight [C], computed in fp32.

    Residual activations of Qwen2.5 reach about 8,000; their squares do not fit in fp16.
    """
    return _RMSNorm.apply(x, weight, eps) if torch.is_grad_enabled() else _normalized(x, eps)[0] * weight


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (arXiv 2002.05202), for tensors of one shape."""
    return _SwiGLU.apply(gate, up) if torch.is_grad_enabled() else F.silu(gate).mul_(up)


def _normalized(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / rms(x) in x's dtype, and 1 / rms(x) [..., 1] in fp32."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype), scale


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normalized, scale = _normalized(x, eps)
        ctx.save_for_backward(x, weight, scale)
        return normalized * weight

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        normalized = x.float().mul_(scale)
        by_weight = None  # the base is frozen, but for who trains one from scratch
        if ctx.needs_input_grad[1]:
            by_weight = (grad.float() * normalized).flatten(0, -2).sum(0).to(weight.dtype)
        grad = grad.float() * weight.float()
        along = torch.linalg.vecdot(grad, normalized)[..., None] / x.shape[-1]  # [..., 1]
        by_x = grad.sub_(normalized.mul_(along)).mul_(scale).to(x.dtype)
        return by_x, by_weight, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        by_gate = grad * up
        torch.ops.aten.silu_backward.grad_input(by_gate, gate, grad_input=by_gate)
        return by_gate, F.silu(gate).mul_(grad)
