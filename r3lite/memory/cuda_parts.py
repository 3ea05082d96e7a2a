"""What a run takes on a CUDA card beside its tensors: one figure per part, each with its source.

`python -m r3lite.doctor` prints each beside what it measures on your card.
"""

from dataclasses import dataclass

import torch

from r3lite.devices.live_tensors import MIB

THREADS = 2  # threads that multiply matrices: ours and autograd's


@dataclass(frozen=True)
class Beside:
    """Bytes beside tensors on a kind of card.

    `context`: the CUDA context, which the driver makes before the first tensor. 426 MiB were reported for PyTorch 2.10
    on an RTX 6000 Ada (https://github.com/unslothai/unsloth-zoo/pull/1053), about 250 for 1.13
    (https://github.com/pytorch/pytorch/pull/86509). Kernels are loaded into the context when they are first used, hence
    a little more here.

    `workspace`: what cuBLAS gets for each thread and stream that multiplies. Unless CUBLAS_WORKSPACE_CONFIG is set,
    this is `:4096:2:16:8`, two buffers of 4096 KiB and eight of 16 (aten/src/ATen/cuda/CublasHandlePool.cpp).
    """

    context: int = 434 * MIB
    workspace: int = (2 * 4096 + 8 * 16) * 1024


LAPTOP = Beside()
# Compute capability 9 and above. The context was measured on an H200 with PyTorch 2.11: 753 MiB after SFT, 829 after
# doctor. The workspace is 32 MiB there, on some newer cards only in some versions.
HOPPER = Beside(context=832 * MIB, workspace=32 * MIB)
# PyTorch's allocator takes memory from the driver in pieces: small ones for tensors below 1 MiB, large ones for tensors
# up to 10 MiB. A larger tensor has a piece of its own, whose size is a multiple of the small one
# (c10/core/AllocatorConfig.h: kSmallBuffer, kLargeBuffer).
SMALL_PIECE = 2 * MIB
LARGE_PIECE = 20 * MIB
# Unused bytes in pieces that have a tensor, as a share of the bytes of tensors. An H200 had 3.5 to 6 % in SFT and RL.
FRAGMENTATION = 0.06
NEW_CARDS = ("H100", "RTX 50")  # the cards of devices/cards.py whose names begin so have HOPPER's figures
NOT_TENSORS = ("context", "graph pools", "fragmentation")  # parts that PyTorch's allocator does not count as allocated


def beside_of_this_card() -> Beside:
    """Returns the figures of the card in this machine; LAPTOP if there is none, or if it is older than Hopper."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0):
        return HOPPER
    return LAPTOP


def beside_of_card(name: str) -> Beside:
    """Returns the figures of a card of devices/cards.py, by its name there."""
    if name.startswith(NEW_CARDS):
        return HOPPER
    return LAPTOP


def beside_tensors(tensors: int, captured: int = 0, card: Beside = LAPTOP, pools: int = 1) -> dict[str, int]:
    """Returns bytes by part, in a phase with `tensors` bytes of tensors.

    `captured`: the bytes of tensors of a step that is run as CUDA graphs; 0 if there is none. The graphs of a decoder
    share a pool of memory, which no other tensor can use, and which also has a cuBLAS workspace for the graphs.
    `pools`: the number of decoders.
    """
    parts = {"context": card.context, "cuBLAS workspace": THREADS * card.workspace}
    if captured:
        large_tensors = -(-(captured + card.workspace) // SMALL_PIECE) * SMALL_PIECE
        pool = SMALL_PIECE + max(LARGE_PIECE, large_tensors)  # a piece for small tensors, and the others
        parts["graph pools"] = pools * pool
    return parts | {"fragmentation": int(tensors * FRAGMENTATION)}
