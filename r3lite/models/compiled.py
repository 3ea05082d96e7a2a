"""Compiles the one function that gains by it, the one that makes NF4 weights dense.

One kernel then does the work of several that move more bytes. The function is compiled once for any number of rows,
not for each number.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from r3lite.models.causal_lm import CausalLM
from r3lite.models.nf4 import Nf4Weight, code_points, dense_blocks, joined
from r3lite.models.projections import Nf4Linear


def missing_compiler(device: torch.device) -> str | None:
    """Returns why nothing can be compiled for a device, such as a missing C++ compiler; None if compiling works."""
    try:
        _compiled(torch.neg)(torch.ones(2, device=device))
    except (RuntimeError, ImportError) as error:
        return str(error).strip().partition("\n")[0]
    return None


def enable(model: CausalLM) -> None:
    """Has the model's NF4 weights made dense by compiled code, from now on.

    The code is compiled now, which takes tens of seconds, so that no step of a run waits for it.
    """
    dequantize = _Dequantizer()
    layers = [module for module in model.modules() if isinstance(module, Nf4Linear)]
    for layer in layers:
        layer.dequantize = dequantize
    if layers:
        dequantize([layers[0].weight], model.head_weight.dtype)


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
            marked = Nf4Weight(
                codes=_any_size(weight.codes),
                absmax=_any_size(weight.absmax),
                absmax_scale=_any_size(weight.absmax_scale),
                absmax_mean=_any_size(weight.absmax_mean),
            )
            blocks = self.dense_blocks(marked, code_points(weight.device), dtype)
            parts.append(blocks.view(weight.shape))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _any_size(tensor: Tensor) -> Tensor:
    """Returns the tensor [N, ...], marked so that the same code is used for any N above 1."""
    # `.data` is not a view: for a view, the shape of the tensor that it shows would be compiled in.
    tensor = tensor.contiguous().data
    torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensor
