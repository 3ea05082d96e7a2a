"""Products of a few rows by a large weight, by the kernel that computes them fastest.

Of fp32 numbers a CPU's `F.linear` asks MKL, which is made for many rows. PyTorch also ships oneDNN, by which it
multiplies bf16. Without gradients a few rows are multiplied by that: Qwen2.5-0.5B's head and gate with up, two cores
of an AMD EPYC, took 0.34 to 0.59 of the time (docs/figures.md).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# oneDNN compiles a kernel for each number of rows, in half a millisecond, and keeps it, in half a MiB: so not for the
# passes of training, whose rows are of any number. Small weights it multiplies no faster than MKL does.
MOST_ROWS = 128
LEAST_WEIGHT = 2**19  # numbers


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, added: Tensor | None = None) -> Tensor:
    """x [N, in] times weight [out, in], plus a bias [out] or what is `added` [N, out]: [N, out]."""
    assert bias is None or added is None
    if not _few_of_fp32(x, weight):
        return F.linear(x, weight, bias) if added is None else torch.addmm(added, x, weight.t())
    # What torch.compile makes of F.linear on a CPU if the weight is frozen; it has no gradient.
    if added is None:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return torch.ops.mkldnn._linear_pointwise.binary(x, added, weight, None, "add")


def _few_of_fp32(x: Tensor, weight: Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and 0 < len(x) <= MOST_ROWS
        and weight.numel() >= LEAST_WEIGHT
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.is_available()
    )
