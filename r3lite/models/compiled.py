"""torch.compile of what it serves: NF4 weights are made dense by one kernel, and not by several that move more bytes.

The function is compiled for any number of rows, not for each number.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from r3lite.models.causal_lm import CausalLM
from r3lite.models.nf4 import Nf4Weight, code_points, dense_blocks, joined
from r3lite.models.projections import Nf4Linear


def missing_compiler(device: torch.device) -> str | None:
    """Why nothing can be compiled for a device, such as that there is no C++ compiler or no Triton; None if it can."""
    try:
        _compiled(torch.neg)(torch.ones(2, device=device))
    except (RuntimeError, ImportError) as error:
        return str(error).strip().partition("\n")[0]
    return None


def enable(model: CausalLM) -> None:
    """From now on the model's NF4 weights are made dense by compiled code; it is compiled now. Takes tens of seconds.

    So no step of a run waits for it.
    """
    dequantize, packed = _Dequantizer(), [module for module in model.modules() if isinstance(module, Nf4Linear)]
    for module in packed:
        module.dequantize = dequantize
    for module in packed[:1]:
        module.dequantize([module.weight], model.head_weight.dtype)


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


def _any_size(tensor: Tensor) -> Tensor:
    """The tensor [N, ...], for any N above 1 of which the same code is used."""
    tensor = tensor.contiguous().data  # not a view, of which the shape of what it shows would be compiled in
    torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensor
