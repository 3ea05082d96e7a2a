"""The linear layers of a network that read the same x, computed as one product, each with the adapter that is on.

Owns what a layer with adapters computes and its gradient; which adapters there are is up to models/lora.py. Few large
products take less time than many small ones: on a card, starting a kernel takes longer than computing one token's.
So the weights of STACKS are laid one after another in memory, where each still is a parameter of its own.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
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
# Layers of some families, by the names that PEFT uses, and which of PROJECTIONS each of them stands for. A short
# convolution (models/lfm2.py) and a gated delta rule (models/qwen3_5.py) read and write like an attention.
ALIASES = {
    "input_linear": ("gate_proj", "up_proj"), "output_linear": ("down_proj",),
    "in_proj": ("q_proj", "k_proj", "v_proj"), "out_proj": ("o_proj",),
    "w1": ("gate_proj",), "w3": ("up_proj",), "w2": ("down_proj",),
    "in_proj_qkv": ("q_proj", "k_proj", "v_proj"), "in_proj_z": ("q_proj",), "in_proj_b": ("v_proj",),
    "in_proj_a": ("k_proj",),
}  # fmt: skip
ADAPTED = (*PROJECTIONS, *ALIASES)  # all layers that may have an adapter
# Up to this many rows a CPU computes the small products of an adapter faster in fp32 than in half precision: 1 row in
# 12 to 22 us instead of 31 to 63, 8 rows in 28 to 62 instead of 50 to 65 (two cores with bf16, Qwen2.5-0.5B's shape,
# r=8).
FEW_ROWS = 8


def of_model(targets: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    """Returns the `names` of a model's layers that are a target, or stand for one, in the order of ADAPTED.

    Used as targets, the result means the same layers of the model.
    """
    wanted = set(targets)
    present = set(names)
    return tuple(name for name in ADAPTED if name in present and wanted & {name, *ALIASES.get(name, ())})


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
        """The factor of B A: alpha / r, or alpha / sqrt(r) for rsLoRA (arXiv 2312.03732)."""
        if self.rslora:
            return self.alpha / math.sqrt(self.r)
        return self.alpha / self.r


@dataclass
class Switch:
    """The configs of a model's adapters and the name of the one that is on; all LoRA layers of the model share it.

    Within lora.cast_once, where only the switch changes what layers multiply by, `stacks` keeps their stacks; a key has
    the layers, the adapter that is on and whether the layers train. Elsewhere it is None.
    """

    configs: dict[str, LoraConfig] = field(default_factory=dict)
    active: str | None = None
    stacks: "dict[tuple, Stack] | None" = None

    @contextmanager
    def to(self, name: str | None) -> Iterator[None]:
        """Switches the adapter `name` on (None: all off) within a `with` block."""
        previous = self.active
        self.active = name
        try:
            yield
        finally:
            self.active = previous


class Nf4Linear(nn.Module):
    """A frozen linear layer whose weight is in NF4.

    Products are computed in x's dtype, or autocast's. `dtype` is that of the dense layer that this one replaces.
    """

    def __init__(
        self,
        weight: Nf4Weight,
        bias: nn.Parameter | None,
        dtype: torch.dtype,
    ):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.dtype = dtype
        self.dequantize = dequantize  # replaced by models.compiled
        for name, tensor in vars(weight).items():
            self.register_buffer(name, tensor)

    @property
    def weight(self) -> Nf4Weight:
        return Nf4Weight(
            codes=self.codes,
            absmax=self.absmax,
            absmax_scale=self.absmax_scale,
            absmax_mean=self.absmax_mean,
        )

    def forward(self, x: Tensor) -> Tensor:
        return project([self], x)

    def dense(self) -> nn.Linear:
        """Returns the same layer with an ordinary weight."""
        weight = dequantize([self.weight], self.dtype)
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.bias = self.bias
        return layer.train(self.training)


class ActiveAdapter(NamedTuple):
    """The weights, in one layer, of the adapter that is on. It adds scale * B A dropout(x) to the layer's output."""

    A: Tensor  # fp32 [r, in]
    B: Tensor  # fp32 [out, r]
    scale: float
    dropout: float


class LoraLinear(nn.Module):
    """A linear layer with adapters: base(x), plus what the adapter that is on adds."""

    def __init__(self, base: nn.Linear | Nf4Linear, switch: Switch):
        super().__init__()
        self.base = base
        self.switch = switch
        self.lora_A = nn.ParameterDict()
        self.lora_B = nn.ParameterDict()

    @property
    def adapter(self) -> ActiveAdapter | None:
        """The adapter that is on, if this layer is one of its targets."""
        name = self.switch.active
        if name is None or name not in self.lora_A:
            return None
        config = self.switch.configs[name]
        return ActiveAdapter(
            A=self.lora_A[name],
            B=self.lora_B[name],
            scale=config.scale,
            dropout=config.dropout if self.training else 0.0,
        )

    def forward(self, x: Tensor) -> Tensor:
        return project([self], x)


class Stack:
    """Linear layers that read the same x, and the adapter that is on: `project` multiplies by their weights.

    Making a stack takes tens of microseconds, so the stacks of a pass are kept for the next pass where that is safe,
    see Switch.
    """

    def __init__(self, layers: Sequence[nn.Module]):
        self.bases = []
        self.on: list[ActiveAdapter] = []
        # For each layer with the adapter: the adapter's weights there, the layer's columns of the output, and its
        # columns of A x, where the A x of all layers are side by side.
        self.places: list[tuple[ActiveAdapter, slice, slice]] = []
        column = 0
        rank = 0
        for layer in layers:
            is_lora = isinstance(layer, LoraLinear)
            base = layer.base if is_lora else layer
            adapter = layer.adapter if is_lora else None
            next_column = column + base.out_features
            if adapter:
                next_rank = rank + len(adapter.A)
                self.on.append(adapter)
                self.places.append((adapter, slice(column, next_column), slice(rank, next_rank)))
                rank = next_rank
            self.bases.append(base)
            column = next_column
        self.dropout = max((adapter.dropout for adapter in self.on), default=0.0)
        self.casts: dict[torch.dtype, tuple[Tensor, list[Tensor]]] = {}

    @staticmethod
    def of(layers: Sequence[nn.Module]) -> "Stack":
        """Returns the stack of nn.Linear, Nf4Linear or LoraLinear layers; the one that the switch keeps, if any."""
        adapted = next((layer for layer in layers if isinstance(layer, LoraLinear)), None)
        if adapted is None or adapted.switch.stacks is None:
            return Stack(layers)
        stacks = adapted.switch.stacks
        key = (*layers, adapted.switch.active, adapted.training)
        if key not in stacks:
            stacks[key] = Stack(layers)
        return stacks[key]

    @property
    def is_frozen(self) -> bool:
        return not any(base.weight.requires_grad for base in self.bases if isinstance(base, nn.Linear))

    @property
    def parameters(self) -> list[Tensor]:
        """A and B of the adapter that is on, for each layer that it adapts."""
        return [weight for adapter in self.on for weight in (adapter.A, adapter.B)]

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight [sum of out, in]; in NF4 it is dequantized by each call, which saves memory."""
        if self._dense is None:
            return _weight(self.bases, dtype)
        return self._dense.to(dtype)

    @cached_property
    def _dense(self) -> Tensor | None:
        """The weights as one, if none is in NF4 and they lie one after another in memory."""
        weights = [base.weight for base in self.bases]
        if any(isinstance(weight, Nf4Weight) for weight in weights):
            return None
        return adjacent(weights)

    @cached_property
    def bias(self) -> Tensor | None:
        """The biases [sum of out]."""
        if self.bases[0].bias is None:
            return None
        return side_by_side([base.bias for base in self.bases])

    def cast(self, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """Returns all layers' A as one [sum of r, in], and the B [out, r] of each layer, in a product's dtype."""
        if dtype not in self.casts:
            A = side_by_side([adapter.A for adapter in self.on])
            Bs = [adapter.B for adapter in self.on]
            self.casts[dtype] = A.to(dtype), [B.to(dtype) for B in Bs]
        return self.casts[dtype]


def project(
    layers: Sequence[nn.Module],
    x: Tensor,
    residual: Tensor | None = None,
) -> Tensor:
    """Returns the outputs of linear layers for the same x [..., in], side by side: [..., sum of out].

    A layer is an nn.Linear, an Nf4Linear, or a LoraLinear of one of them. The products of an adapter are in the dtype
    of the base's product, or in fp32 for a few half-precision rows on a CPU without gradients. A `residual`
    [..., sum of out] is added to the outputs.
    """
    stack = Stack.of(layers)
    if stack.dropout and len(layers) > 1:  # each layer drops other numbers of x
        assert residual is None
        return torch.cat([project([layer], x) for layer in layers], dim=-1)
    rows = x.flatten(0, -2)  # [N, in]
    if torch.is_autocast_enabled(x.device.type):
        rows = rows.to(torch.get_autocast_dtype(x.device.type))
    added = None
    if residual is not None and residual.dtype == rows.dtype:
        added = residual.flatten(0, -2)  # [N, out]
    dropped = None
    if stack.dropout:
        dropped = F.dropout(rows, stack.dropout)
    if not torch.is_grad_enabled():
        out = _without_gradients(stack, rows, dropped=dropped, added=added)
    elif stack.is_frozen:
        out = _Projected.apply(rows, dropped, added, stack, *stack.parameters)
    else:
        assert not stack.on, "the base of an adapter is frozen"
        out = torch.cat([base(rows) for base in stack.bases], dim=-1)
        if added is not None:
            out = added + out
    out = out.unflatten(0, x.shape[:-1])
    if residual is not None and added is None:  # under autocast the residual is wider
        out = residual + out
    return out


def _without_gradients(
    stack: Stack,
    x: Tensor,
    dropped: Tensor | None,
    added: Tensor | None,
) -> Tensor:
    """Returns the layers' outputs [N, sum of out] for x [N, in]; the adapters read `dropped` in its place, if given."""
    out = _frozen(stack, x, added)
    if not stack.on:
        return out
    adapter_x = x if dropped is None else dropped
    if len(x) <= FEW_ROWS and x.dtype.itemsize == 2 and x.device.type == "cpu":
        A, Bs = stack.cast(torch.float32)
        low = F.linear(adapter_x.float(), A)  # [N, sum of r]
        for B, (adapter, columns, ranks) in zip(Bs, stack.places, strict=True):
            out[:, columns].add_(F.linear(low[:, ranks], B), alpha=adapter.scale)
        return out
    A, Bs = stack.cast(out.dtype)
    low = F.linear(adapter_x, A)  # [N, sum of r]
    return _add_adapters(out, low, Bs=Bs, stack=stack)


def _frozen(
    stack: Stack,
    x: Tensor,
    added: Tensor | None,
) -> Tensor:
    """Returns the outputs [N, sum of out] of the layers without adapters, for x [N, in], plus `added`."""
    weight = stack.weight(x.dtype)
    if added is not None:
        assert stack.bias is None and len(stack.bases) == 1
        return linear(x, weight, added=added)
    if stack.bias is not None:
        return linear(x, weight, bias=stack.bias.to(x.dtype))
    return linear(x, weight)


def _weight(bases: list[nn.Module], dtype: torch.dtype) -> Tensor:
    """Returns the layers' weights [sum of out, in], dequantized or copied to lie one after another."""
    weights = [base.weight for base in bases]
    packed = [isinstance(weight, Nf4Weight) for weight in weights]
    if all(packed):
        return bases[0].dequantize(weights, dtype)
    if any(packed):  # an adapter was merged into some of them
        return torch.cat([_weight([base], dtype) for base in bases])
    return side_by_side(weights).to(dtype)


def _add_adapters(
    out: Tensor,
    low: Tensor,
    Bs: list[Tensor],
    stack: Stack,
) -> Tensor:
    """Adds scale * B low to the outputs [N, sum of out], in place: an adapter's output is never a tensor of its own."""
    for B, (adapter, columns, ranks) in zip(Bs, stack.places, strict=True):
        out[:, columns].addmm_(low[:, ranks], B.t(), alpha=adapter.scale)
    return out


class _Projected(torch.autograd.Function):
    """Frozen linear layers with their adapters. All add to one gradient of x; autograd would make many and sum them."""

    @staticmethod
    def forward(ctx, x, dropped, added, stack, *weights):
        out = _frozen(stack, x, added)
        if weights:
            adapter_x = x if dropped is None else dropped
            A, Bs = stack.cast(out.dtype)
            low = F.linear(adapter_x, A)  # [N, sum of r]
            _add_adapters(out, low, Bs=Bs, stack=stack)
            ctx.save_for_backward(adapter_x, low, *weights)
        ctx.stack = stack
        ctx.drops = dropped is not None
        ctx.adds = added is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad_x = None
        grad_dropped = None
        grad_added = grad if ctx.adds else None
        if ctx.needs_input_grad[0]:
            grad_x = linear(grad, ctx.stack.weight(grad.dtype).t())  # [N, in]
        weight_grads = [None] * (len(ctx.needs_input_grad) - 4)
        if weight_grads:
            adapter_x, low, *weights = ctx.saved_tensors
            places = ctx.stack.places
            grad_low = torch.empty_like(low)
            A, Bs = ctx.stack.cast(grad.dtype)
            for B, (adapter, columns, ranks) in zip(Bs, places, strict=True):
                _product(grad[:, columns], B, scale=adapter.scale, out=grad_low[:, ranks])
            if weights[0].requires_grad:
                # The gradients of all A are one tensor, and those of all B, so that each becomes fp32 in one operation.
                # All have the same r, because they belong to one adapter.
                out_sizes = [len(B) for B in Bs]
                grad_A = (grad_low.t() @ adapter_x).to(weights[0].dtype)  # [sum of r, in]
                grad_B = grad.new_empty(sum(out_sizes), Bs[0].shape[1])  # [sum of out, r]
                pieces = grad_B.split(out_sizes)
                for piece, (adapter, columns, ranks) in zip(pieces, places, strict=True):
                    _product(grad[:, columns].t(), low[:, ranks], scale=adapter.scale, out=piece)
                weight_grads[::2] = grad_A.split([len(weight) for weight in weights[::2]])
                weight_grads[1::2] = grad_B.to(weights[0].dtype).split(out_sizes)
            if ctx.drops:
                grad_dropped = grad_low @ A
            elif grad_x is not None:
                grad_x.addmm_(grad_low, A)
        return grad_x, grad_dropped, grad_added, None, *weight_grads


def _product(
    a: Tensor,
    b: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """Writes scale * a b to `out` in one operation."""
    torch.addmm(a.new_empty(1), a, b, beta=0, alpha=scale, out=out)
