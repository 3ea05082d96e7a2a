"""What a run takes on a CUDA card beside its tensors: one figure a part, each with its source.

`python -m r3lite.doctor` prints each beside what it measures on your card.
"""

import torch

from r3lite.devices.live_tensors import MIB

# The driver's context, made before the first tensor. 426 MiB were told of PyTorch 2.10 on an RTX 6000 Ada
# (https://github.com/unslothai/unsloth-zoo/pull/1053), about 250 of 1.13 (https://github.com/pytorch/pytorch/pull/86509).
# Kernels are loaded into it when they are first used, hence a little more.
CONTEXT = 434 * MIB
# cuBLAS gets :4096:2:16:8, unless CUBLAS_WORKSPACE_CONFIG says otherwise, for each thread and stream that multiply
# (aten/src/ATen/cuda/CublasHandlePool.cpp): for ours, and for autograd's. From Hopper on (compute capability 9) it is
# 32 MiB, on some newer cards only in some versions.
CUBLAS_WORKSPACE, HOPPER_WORKSPACE = (2 * 4096 + 8 * 16) << 10, 32 * MIB
THREADS = 2
# PyTorch's allocator takes memory from the driver in such pieces, the small one for tensors below 1 MiB; tensors above
# 10 MiB have pieces of their own, in steps of the small one (c10/core/AllocatorConfig.h: kSmallBuffer, kLargeBuffer).
SMALL_PIECE, LARGE_PIECE = 2 * MIB, 20 * MIB
# Of the bytes of tensors: what lies unused in pieces that are in use. Assumed, as nothing was found that measures it.
FRAGMENTATION = 0.05
NOT_TENSORS = ("context", "graph pools", "fragmentation")  # parts that the allocator does not count as allocated


def cublas_workspace() -> int:
    """Bytes that cuBLAS gets for each thread on the card in use."""
    return HOPPER_WORKSPACE if torch.cuda.get_device_capability() >= (9, 0) else CUBLAS_WORKSPACE


def beside_tensors(tensors: int, captured: int = 0, workspace: int = CUBLAS_WORKSPACE) -> dict[str, int]:
    """Bytes by part, in a phase with `tensors` bytes of tensors; `captured`: those of a step run as CUDA graphs, or 0;
    `workspace`: cuBLAS's for a thread.

    The graphs of a run share one pool, which no other tensor can use, and have a cuBLAS workspace of their own in it.
    """
    parts = {"context": CONTEXT, "cuBLAS workspace": THREADS * workspace}
    if captured:
        pieces = -(-(captured + workspace) // SMALL_PIECE) * SMALL_PIECE
        parts["graph pools"] = SMALL_PIECE + max(LARGE_PIECE, pieces)
    return parts | {"fragmentation": int(tensors * FRAGMENTATION)}
