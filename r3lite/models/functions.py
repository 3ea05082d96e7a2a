"""Layer functions that keep for the backward pass only what they were given: norm, SwiGLU, linear with an adapter.

Left to autograd, each keeps or makes several copies of its input, in fp32 for the norm.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from r3lite.models.nf4 import Nf4Linear, dequantize

# Up to so many rows a CPU makes the small products of an adapter faster in fp32 than in half precision: for one row
# in 12 to 22 us, not 31 to 63, for 8 rows in 28 to 62, not 50 to 65 (two cores with bf16, Qwen2.5-0.5B's shape, r=8).
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
    x: Tensor, dropped: Tensor | None, A: Tensor, B: Tensor, base: nn.Linear | Nf4Linear, scale: float
) -> Tensor:
    """base(x) + scale * B A x for x [N, in], A [r, in] and B [out, r]; the adapter reads `dropped` where it is given.

    The base is frozen. A and B are in fp32; products are in the dtype of the base's output, but see `in_fp32`.
    """
    inputs = x, dropped, A, B, base, scale
    if torch.is_grad_enabled():
        return _AdaptedLinear.apply(*inputs)
    return _adapted_in_fp32(*inputs) if in_fp32(x) else _adapted(*inputs)[0]


def in_fp32(x: Tensor) -> bool:
    """Whether an adapter's products with half-precision x [N, in] are in fp32: a few rows, no gradients, on a CPU."""
    few = len(x) <= FEW_ROWS and x.dtype.itemsize == 2
    return few and x.device.type == "cpu" and not torch.is_grad_enabled()


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


def _adapted(
    x: Tensor, dropped: Tensor | None, A: Tensor, B: Tensor, base: nn.Module, scale: float
) -> tuple[Tensor, Tensor]:
    """The output [N, out] of a layer with its adapter, and A dropped(x) [N, r], in the dtype of the base's output."""
    out = base(x)
    low = F.linear(x if dropped is None else dropped, A.to(out.dtype))
    # In place: the adapter's output is never a tensor of its own.
    return out.addmm_(low, B.to(out.dtype).t(), alpha=scale), low


def _adapted_in_fp32(x: Tensor, dropped: Tensor | None, A: Tensor, B: Tensor, base: nn.Module, scale: float) -> Tensor:
    """The output of `_adapted` with the adapter's products in fp32, rounded once."""
    low = F.linear((x if dropped is None else dropped).float(), A)
    return base(x).add_(F.linear(low, B), alpha=scale)


class _AdaptedLinear(torch.autograd.Function):
    """A frozen linear layer with an adapter. Both add to one gradient of x, where autograd would make two and a sum."""

    @staticmethod
    def forward(ctx, x, dropped, A, B, base, scale):
        out, low = _adapted(x, dropped, A, B, base, scale)
        ctx.save_for_backward(x if dropped is None else dropped, low, A, B)
        ctx.base, ctx.scale, ctx.drops = base, scale, dropped is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        read, low, A, B = ctx.saved_tensors  # what the adapter read: [N, in], perhaps with dropout
        by_low = (grad @ B.to(grad.dtype)).mul_(ctx.scale)  # [N, r]
        by_A = by_B = by_x = by_dropped = None
        if A.requires_grad:
            by_A = (by_low.t() @ read.to(grad.dtype)).to(A.dtype)
            by_B = (grad.t() @ low).mul_(ctx.scale).to(B.dtype)
        if ctx.needs_input_grad[0]:
            by_x = grad @ _dense_weight(ctx.base, grad.dtype)
            if ctx.drops:
                by_dropped = (by_low @ A.to(grad.dtype)).to(read.dtype)
            else:
                by_x.addmm_(by_low, A.to(grad.dtype))
            by_x = by_x.to(read.dtype)  # under autocast x may be wider
        return by_x, by_dropped, by_A, by_B, None, None


def _dense_weight(base: nn.Linear | Nf4Linear, dtype: torch.dtype) -> Tensor:
    """A base's weight [out, in]; one in NF4 is dequantized again rather than kept since the forward pass."""
    return dequantize(base.weight, dtype) if isinstance(base, Nf4Linear) else base.weight.to(dtype)
