"""Products of rows by a weight, on a CPU by the kernels that compute them fastest.

On a CPU `F.linear` multiplies fp32 numbers with MKL. PyTorch also ships oneDNN, with which it multiplies bf16. oneDNN
reads large weights faster, and with AVX-512 it uses all of an AMD processor's width, which MKL does not.
bench/products.py compares the two.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# oneDNN compiles a kernel for each number of rows, which takes half a millisecond, and keeps it in half a MiB. To need
# few kernels, many rows are multiplied BLOCK at a time, and more than STEP rows are filled up to a multiple of STEP.
BLOCK = 256
STEP = 8
# Where both the weight and the product are smaller than this, oneDNN is no faster than MKL.
MIN_WEIGHT = 2**19  # numbers of a weight
MIN_PRODUCT = 2**22  # multiplications
# On a processor with AVX2 and without AVX-512, MKL is as fast at computing: there oneDNN is faster only if it has to
# read a weight of this size for few rows.
ONLY_AVX2 = torch.backends.cpu.get_cpu_capability() == "AVX2"
MIN_WEIGHT_AVX2 = 2**21  # numbers of a weight


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    added: Tensor | None = None,
) -> Tensor:
    """Returns the product [N, out] of x [N, in] and a weight [out, in], plus a `bias` [out] or `added` [N, out]."""
    assert bias is None or added is None
    if not _by_onednn(x, weight):
        if added is None:
            return F.linear(x, weight, bias)
        return torch.addmm(added, x, weight.t())
    if len(x) <= STEP or (len(x) <= BLOCK and len(x) % STEP == 0):
        return _block(x, weight, bias=bias, added=added)
    # Not a view of a tensor with more rows: autograd forbids callers to write into such a result.
    out = x.new_empty(len(x), len(weight))
    for first in range(0, len(x), BLOCK):
        rows = slice(first, first + BLOCK)
        block_added = None if added is None else added[rows]
        out[rows] = _block(x[rows], weight, bias=bias, added=block_added)
    return out


def _by_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and len(x) > 0
        and _onednn_is_faster(x, weight)
        and not torch.is_grad_enabled()  # oneDNN's operator has no gradient
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.enabled
        and torch.backends.mkldnn.is_available()
    )


def _onednn_is_faster(x: Tensor, weight: Tensor) -> bool:
    if ONLY_AVX2:
        # The product of a gradient reads a transposed weight, which is not contiguous; oneDNN is slower with it.
        return len(x) <= BLOCK and weight.numel() >= MIN_WEIGHT_AVX2 and weight.is_contiguous()
    return weight.numel() >= MIN_WEIGHT or len(x) * weight.numel() >= MIN_PRODUCT


def _block(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    added: Tensor | None,
) -> Tensor:
    """Computes `linear` for up to BLOCK rows, by the operator that torch.compile uses on a CPU for a frozen weight."""
    fill = 0
    if len(x) > STEP:
        fill = -len(x) % STEP
    if fill:
        x = F.pad(x, (0, 0, 0, fill))
        if added is not None:
            added = F.pad(added, (0, 0, 0, fill))
    if added is None:
        out = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    else:
        out = torch.ops.mkldnn._linear_pointwise.binary(x, added, weight, None, "add")
    return out[:-fill] if fill else out
