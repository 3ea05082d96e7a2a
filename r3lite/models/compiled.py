"""torch.compile of what it serves: a layer in passes without gradients, and NF4 weights made dense.

What is compiled are functions of tensors, without graph breaks: which weights lie side by side, which adapter is on and
what a query attends to is settled before they are called. In passes with gradients layers are not compiled: the
gradients of models/projections.py and models/functions.py are written by hand. A function is compiled for one row and
for any number of rows, not for each number, so that what is computed does not depend on the lengths seen before. One
row's logits are compiled too on a CPU, where they take as long as a quarter of the layers.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from r3lite.models.attention import AttentionContext, CausalRows
from r3lite.models.causal_lm import CausalLM, Layer, RMSNorm, rotary_angles
from r3lite.models.functions import plain_rms_norm, rotate_, swiglu
from r3lite.models.linear import linear
from r3lite.models.nf4 import Nf4Weight, code_points, dense_blocks, joined
from r3lite.models.projections import FEW_ROWS, LoraLinear, Nf4Linear, Operands, operands

LONGEST = 4096  # numbers of a row; those of a longer one Inductor adds up at half the speed


def missing_compiler(device: torch.device) -> str | None:
    """Why nothing can be compiled for a device, such as that there is no C++ compiler or no Triton; None if it can."""
    try:
        _compiled(torch.neg)(torch.ones(2, device=device))
    except (RuntimeError, ImportError) as error:
        return str(error).strip().partition("\n")[0]
    return None


def enable(model: CausalLM) -> None:
    """From now on the model's layers are compiled as the head of this file says. Takes tens of seconds.

    What the adapter that is on needs is compiled now, so that no step of a run waits for it.
    """
    dequantize, run = _Dequantizer(), _LayerRunner()
    packed = [module for module in model.modules() if isinstance(module, Nf4Linear)]
    for module in packed:
        module.dequantize = dequantize
    for layer in model.model.layers:
        layer.compiled = run
    weight = model.head_weight
    with torch.no_grad():
        if weight.device.type == "cpu":
            model.head_product = _HeadProduct()
            model.head_product(weight.new_zeros(1, model.config.hidden_size), weight)
        if packed:
            packed[0].dequantize([packed[0].weight], weight.dtype)
        for rows in (1, 2, FEW_ROWS + 1):
            context = CausalRows(torch.zeros(1, rows, device=weight.device))
            x = weight.new_zeros(1, rows, model.config.hidden_size)
            cos, sin = rotary_angles(context.positions, model.config, x.dtype)
            model.model.layers[0](x, cos, sin, context)


def _compiled(function: Callable) -> Callable:
    return torch.compile(function, fullgraph=True)


class _Dequantizer:
    """nf4.dequantize by a compiled function."""

    def __init__(self):
        self.dense_blocks = _compiled(dense_blocks)

    @torch.no_grad()
    def __call__(self, weights: Sequence[Nf4Weight], dtype: torch.dtype) -> Tensor:
        parts = []
        for weight in joined(weights):
            flat = Nf4Weight(*(_any_size(part) for part in vars(weight).values()))
            parts.append(self.dense_blocks(flat, code_points(weight.device), dtype).view(weight.shape))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class _HeadProduct:
    """Logits [N, V] of hidden states [N, C]: of one row by a compiled function."""

    def __init__(self):
        self.one_row = _compiled(_product)

    def __call__(self, hidden: Tensor, weight: Tensor) -> Tensor:
        if len(hidden) > 1:
            return linear(hidden, weight)
        with torch.autocast(hidden.device.type, enabled=False):  # or it is compiled for either state
            return self.one_row(hidden.data, weight.data)


class _LayerRunner:
    """Runs layers by compiled functions: one up to attention, one from there on."""

    def __init__(self):
        self.before, self.after = _compiled(_before_attention), _compiled(_after_attention)

    def __call__(
        self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext, tile: int | None
    ) -> Tensor:
        """See Layer.forward."""
        if not _can_run(layer, x):
            return layer.halves(x, cos, sin, context, tile)
        shape, attention, mlp = x.shape, layer.self_attn, layer.mlp
        with torch.autocast(x.device.type, enabled=False):
            x = _any_size(x.flatten(0, 1))  # [N, C]
            angles = [_any_size(t.expand(*shape[:2], 1, -1).flatten(0, 1)) for t in (cos, sin)]  # [N, 1, D]
            projections = attention.q_proj, attention.k_proj, attention.v_proj
            norms = [_norm(norm) for norm in (attention.q_norm, attention.k_norm) if norm]
            by = operands(projections, x.dtype, len(x))
            qkv = self.before(x, *angles, _norm(layer.input_layernorm), by, attention.head_dim, norms)  # [N, H+2K, D]
            qkv = qkv.unflatten(0, shape[:2]).transpose(1, 2)  # [B, H + 2 K, T, D]
            q, kv = qkv.split((attention.heads, 2 * attention.kv_heads), dim=1)
            attended = context.attend(attention.layer_idx, q, kv).flatten(0, 1)  # [N, H D]
            done = []
            for some, residual in zip(attended.split(tile or len(x)), x.split(tile or len(x)), strict=True):
                stacks = ((attention.o_proj,), (mlp.gate_proj, mlp.up_proj), (mlp.down_proj,))
                weights = [operands(stack, x.dtype, len(some)) for stack in stacks]
                norm = _norm(layer.post_attention_layernorm)
                done.append(self.after(_any_size(some), _any_size(residual), norm, *weights))
        return (done[0] if len(done) == 1 else torch.cat(done)).view(shape)


def _can_run(layer: Layer, x: Tensor) -> bool:
    """Whether a pass is one that is compiled: without dropout, and in autocast's dtype if that is on."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != x.dtype:
        return False
    linears = (module for module in layer.modules() if isinstance(module, LoraLinear))
    return not layer.training or not any(linear.adapter and linear.adapter.dropout for linear in linears)


def _any_size(tensor: Tensor) -> Tensor:
    """The tensor [N, ...], for any N above 1 of which the same code is used."""
    tensor = tensor.contiguous().data  # not a view, of which the shape of what it shows would be compiled in
    torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensor


def _norm(norm: RMSNorm) -> tuple[Tensor, float]:
    return norm.weight.data, norm.eps


def _before_attention(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    norm: tuple[Tensor, float],
    projections: Operands,
    head_dim: int,
    head_norms: list[tuple[Tensor, float]],
) -> Tensor:
    """Queries and keys, rotated, and values [N, H + 2 K, D] of a layer's input [N, C].

    `head_norms` are those of queries and keys, if the model has them.
    """
    qkv = _project(projections, plain_rms_norm(x, *norm)[0]).unflatten(-1, (-1, head_dim))
    heads = [size // head_dim for size, _ in projections.outs]  # of q, of k and of v
    if head_norms:
        q, k, v = qkv.split(heads, dim=1)
        q, k = (plain_rms_norm(part, *norm)[0] for part, norm in zip((q, k), head_norms, strict=True))
        qkv = torch.cat((q, k, v), dim=1)
    turning = heads[0] + heads[1]
    return rotate_(qkv[None], turning, cos, sin)[0]


def _after_attention(
    attended: Tensor, x: Tensor, norm: tuple[Tensor, float], o: Operands, gate_up: Operands, down: Operands
) -> Tensor:
    """A layer's output [N, C], of its attention's output [N, H D] and its input [N, C]."""
    x = x + _project(o, attended)
    return x + _project(down, swiglu(_project(gate_up, plain_rms_norm(x, *norm)[0])))


def _project(by: Operands, x: Tensor) -> Tensor:
    """The layers' outputs [N, sum of out] for x [N, in], see projections.project."""
    weight = by.weight
    if isinstance(weight, Nf4Weight):
        weight = dense_blocks(weight, by.points, x.dtype).view(weight.shape)
    out = _product(x, weight, by.bias)
    if by.A is None:
        return out
    low = F.linear(x.to(by.A.dtype), by.A)  # [N, sum of r]
    Bs, lows = iter(by.Bs), iter(low.split([B.shape[1] for B in by.Bs], dim=1))
    added = [F.linear(next(lows), next(Bs)) if adapted else low.new_zeros(len(x), size) for size, adapted in by.outs]
    return (out + by.scale * torch.cat(added, dim=1)).to(out.dtype)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, in] times weight [out, in], plus a bias [out]: [N, out].

    One row's on a CPU are sums of their own, because the kernels that PyTorch calls for bf16 read a weight at half the
    speed of memory (docs/figures.md).
    """
    if len(x) > 1 or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    size = x.shape[1]
    pieces = next(n for n in range(1, size + 1) if size % n == 0 and size // n <= LONGEST)
    sums = (weight.view(-1, pieces, size // pieces).float() * x.view(pieces, -1).float()).sum(-1).sum(-1)  # [out]
    return (sums if bias is None else sums + bias.float()).to(x.dtype)[None]
