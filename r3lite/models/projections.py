"""The linear layers of a network that read the same x, computed as one product, each with the adapter that is on.

Owns what a layer with adapters computes and its gradient; which adapters there are is up to models/lora.py. Few large
products take less time than many small ones: on a card, starting a kernel takes longer than computing one token's.
So the weights of STACKS are laid one after another in memory, where each still is a parameter of its own.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from r3lite.models.linear import linear
from r3lite.models.nf4 import Nf4Weight, dequantize
from r3lite.models.stacks import adjacent, side_by_side

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Up to this many rows a CPU computes the small products of an adapter faster in fp32 than in half precision: 1 row in
# 12 to 22 us instead of 31 to 63, 8 rows in 28 to 62 instead of 50 to 65 (two cores with bf16, Qwen2.5-0.5B's shape,
# r=8).
FEW_ROWS = 8


@dataclass(frozen=True)
class LoraConfig:
    """Shape and scale of one adapter."""

    r: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...] = PROJECTIONS
    rslora: bool = False

    @property
    def scale(self) -> float:
        """alpha / r, or alpha / sqrt(r) for rsLoRA (arXiv 2312.03732)."""
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)


@dataclass
class Switch:
    """What all LoRA layers of a model share: the configs of its adapters, and the name of the one that is on.

    While nothing but the switch changes what layers multiply by, as within lora.cast_once, `kept` has their stacks.
    """

    configs: dict[str, LoraConfig] = field(default_factory=dict)
    active: str | None = None
    kept: "dict[tuple, Stack] | None" = None

    @contextmanager
    def to(self, name: str | None) -> Iterator[None]:
        """Switches the adapter `name` on (None: all off) within a `with` block."""
        before, self.active = self.active, name
        try:
            yield
        finally:
            self.active = before


class Nf4Linear(nn.Module):
    """A frozen linear layer whose weight is in NF4.

    Products are computed in x's dtype, or autocast's. `dtype` is that of the dense layer that this one replaces.
    """

    def __init__(self, weight: Nf4Weight, bias: nn.Parameter | None, dtype: torch.dtype):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias, self.dtype = bias, dtype
        self.dequantize = dequantize  # replaced by models.compiled
        for name, tensor in vars(weight).items():
            self.register_buffer(name, tensor)

    @property
    def weight(self) -> Nf4Weight:
        return Nf4Weight(self.codes, self.absmax, self.absmax_scale, self.absmax_mean)

    def forward(self, x: Tensor) -> Tensor:
        return project([self], x)

    def dense(self) -> nn.Linear:
        """The same layer with an ordinary weight."""
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        layer.weight = nn.Parameter(dequantize([self.weight], self.dtype), requires_grad=False)
        layer.bias = self.bias
        return layer.train(self.training)


class Adapter(NamedTuple):
    """What an adapter that is on adds to one layer: scale * B A dropout(x)."""

    A: Tensor  # fp32 [r, in]
    B: Tensor  # fp32 [out, r]
    scale: float
    dropout: float


class LoraLinear(nn.Module):
    """A linear layer with adapters: base(x), plus what the adapter that is on adds."""

    def __init__(self, base: nn.Linear | Nf4Linear, switch: Switch):
        super().__init__()
        self.base, self.switch = base, switch
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that is on, if this layer is one of its targets."""
        name = self.switch.active
        if name is None or name not in self.lora_A:
            return None
        config = self.switch.configs[name]
        dropout = config.dropout if self.training else 0.0
        return Adapter(self.lora_A[name], self.lora_B[name], config.scale, dropout)

    def forward(self, x: Tensor) -> Tensor:
        return project([self], x)


class Stack:
    """Linear layers that read the same x, and the adapter that is on: what `project` multiplies by.

    Making one takes tens of microseconds, so those of a pass are kept for the next one where that is safe, see Switch.
    """

    def __init__(self, layers: Sequence[nn.Module]):
        self.bases = [layer.base if isinstance(layer, LoraLinear) else layer for layer in layers]
        adapters = [layer.adapter if isinstance(layer, LoraLinear) else None for layer in layers]
        self.on = [adapter for adapter in adapters if adapter]
        self.dropout = max((adapter.dropout for adapter in self.on), default=0.0)
        sizes = [base.out_features for base in self.bases]
        # Of each adapter that is on: it, its columns of the output, and its columns of all A x side by side.
        self.places: list[tuple[Adapter, slice, slice]] = []
        column = rank = 0
        for size, adapter in zip(sizes, adapters, strict=True):
            if adapter:
                self.places.append((adapter, slice(column, column + size), slice(rank, rank + len(adapter.A))))
                rank += len(adapter.A)
            column += size
        self.casts: dict[torch.dtype, tuple[Tensor, list[Tensor]]] = {}

    @staticmethod
    def of(layers: Sequence[nn.Module]) -> "Stack":
        """That of an nn.Linear, an Nf4Linear or a LoraLinear, or of several; the one that is kept, if there is one."""
        first = layers[0]
        if not isinstance(first, LoraLinear) or first.switch.kept is None:
            return Stack(layers)
        kept, key = first.switch.kept, (*layers, first.switch.active, first.training)
        if key not in kept:
            kept[key] = Stack(layers)
        return kept[key]

    @property
    def is_frozen(self) -> bool:
        return not any(base.weight.requires_grad for base in self.bases if isinstance(base, nn.Linear))

    @property
    def parameters(self) -> list[Tensor]:
        """A and B of each adapter that is on."""
        return [weight for adapter in self.on for weight in (adapter.A, adapter.B)]

    def weight(self, dtype: torch.dtype) -> Tensor:
        """The weight [sum of out, in]. One in NF4 is dequantized, which costs less memory than keeping it."""
        return _weight(self.bases, dtype) if self._dense is None else self._dense.to(dtype)

    @cached_property
    def _dense(self) -> Tensor | None:
        """The weights, if they lie one after another in memory."""
        weights = [base.weight for base in self.bases]
        return None if any(isinstance(weight, Nf4Weight) for weight in weights) else adjacent(weights)

    @cached_property
    def bias(self) -> Tensor | None:
        """The biases [sum of out]."""
        return None if self.bases[0].bias is None else side_by_side([base.bias for base in self.bases])

    def cast(self, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """The A [sum of r, in] of the adapters, side by side, and the B [out, r] of each, in a product's dtype."""
        if dtype not in self.casts:
            A = side_by_side([adapter.A for adapter in self.on])
            self.casts[dtype] = A.to(dtype), [adapter.B.to(dtype) for adapter in self.on]
        return self.casts[dtype]


def project(layers: Sequence[nn.Module], x: Tensor, residual: Tensor | None = None) -> Tensor:
    """The outputs of linear layers for the same x [..., in], side by side: [..., sum of out]; plus `residual` if given.

    A layer is an nn.Linear, an Nf4Linear, or a LoraLinear of one of them. The products of an adapter are in the dtype
    of the base's, or in fp32 for a few half-precision rows on a CPU without gradients.
    """
    stack = Stack.of(layers)
    if stack.dropout and len(layers) > 1:  # each of them drops other numbers of x
        assert residual is None
        return torch.cat([project([layer], x) for layer in layers], dim=-1)
    rows = x.flatten(0, -2)  # [N, in]
    if torch.is_autocast_enabled(x.device.type):
        rows = rows.to(torch.get_autocast_dtype(x.device.type))
    added = residual.flatten(0, -2) if residual is not None and residual.dtype == rows.dtype else None  # [N, out]
    dropped = F.dropout(rows, stack.dropout) if stack.dropout else None
    if not torch.is_grad_enabled():
        out = _without_gradients(stack, rows, dropped, added)
    elif stack.is_frozen:
        out = _Projected.apply(rows, dropped, added, stack, *stack.parameters)
    else:
        assert not stack.on, "the base of an adapter is frozen"
        out = torch.cat([base(rows) for base in stack.bases], dim=-1)
        out = out if added is None else added + out
    out = out.unflatten(0, x.shape[:-1])
    return out if residual is None or added is not None else residual + out  # under autocast the residual is wider


def _without_gradients(stack: Stack, x: Tensor, dropped: Tensor | None, added: Tensor | None) -> Tensor:
    """The layers' outputs [N, sum of out] for x [N, in], of which the adapters get `dropped` if that is given."""
    out, adapter_x = _frozen(stack, x, added), x if dropped is None else dropped
    if not stack.on:
        return out
    if len(x) <= FEW_ROWS and x.dtype.itemsize == 2 and x.device.type == "cpu":
        A, Bs = stack.cast(torch.float32)
        low = F.linear(adapter_x.float(), A)  # [N, sum of r]
        for B, (adapter, columns, ranks) in zip(Bs, stack.places, strict=True):
            out[:, columns].add_(F.linear(low[:, ranks], B), alpha=adapter.scale)
        return out
    A, Bs = stack.cast(out.dtype)
    return _add_adapters(out, F.linear(adapter_x, A), Bs, stack)


def _frozen(stack: Stack, x: Tensor, added: Tensor | None) -> Tensor:
    """The outputs [N, sum of out] of the layers without adapters, for x [N, in], plus `added`."""
    weight = stack.weight(x.dtype)
    if added is None:
        return linear(x, weight, None if stack.bias is None else stack.bias.to(x.dtype))
    assert stack.bias is None and len(stack.bases) == 1
    return linear(x, weight, added=added)


def _weight(bases: list[nn.Module], dtype: torch.dtype) -> Tensor:
    """The layers' weights [sum of out, in], dequantized or copied to lie one after another."""
    weights = [base.weight for base in bases]
    if all(isinstance(weight, Nf4Weight) for weight in weights):
        return bases[0].dequantize(weights, dtype)
    if any(isinstance(weight, Nf4Weight) for weight in weights):  # an adapter was merged into some of them
        return torch.cat([_weight([base], dtype) for base in bases])
    return side_by_side(weights).to(dtype)


def _add_adapters(out: Tensor, low: Tensor, Bs: list[Tensor], stack: Stack) -> Tensor:
    """Adds scale * B low to the outputs [N, sum of out], in place: an adapter's output is never a tensor of its own."""
    for B, (adapter, columns, ranks) in zip(Bs, stack.places, strict=True):
        out[:, columns].addmm_(low[:, ranks], B.t(), alpha=adapter.scale)
    return out


class _Projected(torch.autograd.Function):
    """Frozen linear layers with their adapters. All add to one gradient of x; autograd would make many and sum them."""

    @staticmethod
    def forward(ctx, x, dropped, added, stack, *weights):
        out, adapter_x = _frozen(stack, x, added), x if dropped is None else dropped
        if weights:
            A, Bs = stack.cast(out.dtype)
            low = F.linear(adapter_x, A)  # [N, sum of r]
            _add_adapters(out, low, Bs, stack)
            ctx.save_for_backward(adapter_x, low, *weights)
        ctx.stack, ctx.drops, ctx.adds = stack, dropped is not None, added is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad_x = grad_dropped = None
        if ctx.needs_input_grad[0]:
            grad_x = linear(grad, ctx.stack.weight(grad.dtype).t())  # [N, in]
        grads = [None] * (len(ctx.needs_input_grad) - 4)
        if grads:
            adapter_x, low, *weights = ctx.saved_tensors
            places, grad_low = ctx.stack.places, torch.empty_like(low)
            A, Bs = ctx.stack.cast(grad.dtype)
            for B, (adapter, columns, ranks) in zip(Bs, places, strict=True):
                _product(grad[:, columns], B, adapter.scale, out=grad_low[:, ranks])
            if weights[0].requires_grad:
                # Each in one tensor, so that they become fp32 in one operation. All have one r: it is one adapter.
                grad_A = (grad_low.t() @ adapter_x).to(weights[0].dtype)  # [sum of r, in]
                grad_B = grad.new_empty(sum(map(len, Bs)), Bs[0].shape[1])  # [sum of out, r]
                pieces = grad_B.split([len(B) for B in Bs])
                for piece, (adapter, columns, ranks) in zip(pieces, places, strict=True):
                    _product(grad[:, columns].t(), low[:, ranks], adapter.scale, out=piece)
                grads[::2] = grad_A.split([len(weight) for weight in weights[::2]])
                grads[1::2] = grad_B.to(weights[0].dtype).split([len(B) for B in Bs])
            if ctx.drops:
                grad_dropped = grad_low @ A
            elif grad_x is not None:
                grad_x.addmm_(grad_low, A)
        return grad_x, grad_dropped, grad if ctx.adds else None, None, *grads


def _product(a: Tensor, b: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    """scale * a b in one operation; written to `out` if that is given."""
    return torch.addmm(a.new_empty(1), a, b, beta=0, alpha=scale, out=out)
