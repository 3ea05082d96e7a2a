"""Products of rows by a weight, on a CPU by the kernels that compute them fastest.

Of fp32 numbers a CPU's `F.linear` asks MKL. PyTorch also ships oneDNN, by which it multiplies bf16: that reads the
weights faster for a few rows, and uses all of an AMD processor's width for many (docs/figures.md).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# oneDNN compiles a kernel for each number of rows, in half a millisecond, and keeps it, in half a MiB. So that there
# are few, many rows are multiplied BLOCK at a time, and the rest is filled up to a multiple of STEP.
BLOCK, STEP = 256, 8
# Numbers of a weight, and multiplications. What is less than both takes no less time than by MKL.
LEAST_WEIGHT, LEAST_PRODUCT = 2**19, 2**22


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, added: Tensor | None = None) -> Tensor:
    """x [N, in] times weight [out, in], plus a bias [out] or what is `added` [N, out]: [N, out]."""
    assert bias is None or added is None
    if not _by_onednn(x, weight):
        return F.linear(x, weight, bias) if added is None else torch.addmm(added, x, weight.t())
    if len(x) <= STEP or (len(x) <= BLOCK and len(x) % STEP == 0):
        return _block(x, weight, bias, added)
    out = x.new_empty(len(x), len(weight))  # not a view of more rows: autograd lets nobody write into such a result
    for first in range(0, len(x), BLOCK):
        rows = slice(first, first + BLOCK)
        out[rows] = _block(x[rows], weight, bias, None if added is None else added[rows])
    return out


def _by_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and len(x) > 0
        and (weight.numel() >= LEAST_WEIGHT or len(x) * weight.numel() >= LEAST_PRODUCT)
        and not torch.is_grad_enabled()  # oneDNN's operator has no gradient
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.enabled
        and torch.backends.mkldnn.is_available()
    )


def _block(x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None) -> Tensor:
    """The same for at most BLOCK rows, by what torch.compile makes of `F.linear` on a CPU if the weight is frozen."""
    fill = -len(x) % STEP if len(x) > STEP else 0
    if fill:
        x, added = (t if t is None else F.pad(t, (0, 0, 0, fill)) for t in (x, added))
    if added is None:
        out = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    else:
        out = torch.ops.mkldnn._linear_pointwise.binary(x, added, weight, None, "add")
    return out[:-fill] if fill else out
