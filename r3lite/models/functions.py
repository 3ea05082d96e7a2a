"""Layer functions that keep for the backward pass only what they were given: norm, SwiGLU, linear with an adapter.

Autograd by itself keeps or makes several copies of each one's input, in fp32 for the norm.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from r3lite.models.nf4 import Nf4Linear, dequantize

# Up to this many rows a CPU computes the small products of an adapter faster in fp32 than in half precision: 1 row in
# 12 to 22 us instead of 31 to 63, 8 rows in 28 to 62 instead of 50 to 65 (two cores with bf16, Qwen2.5-0.5B's shape,
# r=8).
FEW_ROWS = 8


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm (arXiv 1910.07467) of x [..., C] with weight [C], computed in fp32.

    Residual activations of Qwen2.5 reach about 8,000; their squares do not fit in fp16.
    """
    return _RMSNorm.apply(x, weight, eps) if torch.is_grad_enabled() else _normalized(x, eps)[0] * weight


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (arXiv 2002.05202), for tensors of one shape."""
    return _SwiGLU.apply(gate, up) if torch.is_grad_enabled() else F.silu(gate).mul_(up)


def adapted_linear(
    x: Tensor,
    dropped: Tensor | None,
    A: Tensor,
    B: Tensor,
    base: nn.Linear | Nf4Linear,
    scale: float,
    cast: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """base(x) + scale * B A x for x [N, in], A [r, in] and B [out, r]; if given, `dropped` is the adapter's x.

    The base is frozen. A and B are in fp32. The adapter's products are in the dtype of the base's output, or in fp32
    for a few half-precision rows on a CPU without gradients. `cast` is A and B in the former dtype, if a caller that
    needs no gradients has them.
    """
    if torch.is_grad_enabled():
        return _AdaptedLinear.apply(x, dropped, A, B, base, scale)
    if len(x) <= FEW_ROWS and x.dtype.itemsize == 2 and x.device.type == "cpu":
        return _adapted_in_fp32(x, dropped, A, B, base, scale)
    if cast:
        A, B = cast
    return _adapted(x, dropped, A, B, base, scale)[0]


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
        grad_weight = None
        if ctx.needs_input_grad[1]:  # not in a frozen base; checkpoints/make_tiny.py trains all weights
            grad_weight = (grad.float() * normalized).flatten(0, -2).sum(0).to(weight.dtype)
        grad = grad.float() * weight.float()
        along = torch.linalg.vecdot(grad, normalized)[..., None] / x.shape[-1]  # [..., 1]
        grad_x = grad.sub_(normalized.mul_(along)).mul_(scale).to(x.dtype)
        return grad_x, grad_weight, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate = grad * up
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grad_gate, F.silu(gate).mul_(grad)


def _adapted(
    x: Tensor, dropped: Tensor | None, A: Tensor, B: Tensor, base: nn.Module, scale: float
) -> tuple[Tensor, Tensor]:
    """The output [N, out] of a layer with its adapter, and A dropped(x) [N, r], in the dtype of the base's output."""
    out = base(x)
    low = F.linear(x if dropped is None else dropped, A.to(out.dtype))
    # In place: the adapter's output is never a tensor of its own.
    return out.addmm_(low, B.to(out.dtype).t(), alpha=scale), low


def _adapted_in_fp32(x: Tensor, dropped: Tensor | None, A: Tensor, B: Tensor, base: nn.Module, scale: float) -> Tensor:
    """The output [N, out] of `_adapted`, with the adapter's products computed in fp32 and rounded once."""
    low = F.linear((x if dropped is None else dropped).float(), A)
    return base(x).add_(F.linear(low, B), alpha=scale)


class _AdaptedLinear(torch.autograd.Function):
    """A frozen linear layer with an adapter. Both add to one gradient of x; autograd would make two and their sum."""

    @staticmethod
    def forward(ctx, x, dropped, A, B, base, scale):
        out, low = _adapted(x, dropped, A, B, base, scale)
        ctx.save_for_backward(x if dropped is None else dropped, low, A, B)
        ctx.base, ctx.scale, ctx.drops = base, scale, dropped is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        adapter_x, low, A, B = ctx.saved_tensors  # [N, in], after dropout if there is any
        grad_low = (grad @ B.to(grad.dtype)).mul_(ctx.scale)  # [N, r]
        grad_A = grad_B = grad_x = grad_dropped = None
        if A.requires_grad:
            grad_A = (grad_low.t() @ adapter_x.to(grad.dtype)).to(A.dtype)
            grad_B = (grad.t() @ low).mul_(ctx.scale).to(B.dtype)
        if ctx.needs_input_grad[0]:
            grad_x = grad @ _dense_weight(ctx.base, grad.dtype)
            if ctx.drops:
                grad_dropped = (grad_low @ A.to(grad.dtype)).to(adapter_x.dtype)
            else:
                grad_x.addmm_(grad_low, A.to(grad.dtype))
            grad_x = grad_x.to(adapter_x.dtype)  # under autocast x may be wider
        return grad_x, grad_dropped, grad_A, grad_B, None, None


def _dense_weight(base: nn.Linear | Nf4Linear, dtype: torch.dtype) -> Tensor:
    """A base's weight [out, in]. One in NF4 is dequantized again, which costs less memory than keeping it."""
    return dequantize(base.weight, dtype) if isinstance(base, Nf4Linear) else base.weight.to(dtype)
