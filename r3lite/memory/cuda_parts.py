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

    `context`: the driver's, made before the first tensor. 426 MiB were reported for PyTorch 2.10 on an RTX 6000 Ada
    (https://github.com/unslothai/unsloth-zoo/pull/1053), about 250 of 1.13
    (https://github.com/pytorch/pytorch/pull/86509). Kernels are loaded into it when they are first used, hence a little
    more. `workspace`: cuBLAS gets :4096:2:16:8, unless CUBLAS_WORKSPACE_CONFIG says otherwise, for each thread and
    stream that multiply (aten/src/ATen/cuda/CublasHandlePool.cpp).
    """

    context: int = 434 * MIB
    workspace: int = (2 * 4096 + 8 * 16) << 10


LAPTOP = Beside()
# Compute capability 9 and above. The context was measured on an H200 with PyTorch 2.11: 753 MiB after SFT, 829 after
# doctor. The workspace is 32 MiB there, on some newer cards only in some versions.
HOPPER = Beside(context=832 * MIB, workspace=32 * MIB)
# PyTorch's allocator takes memory from the driver in such pieces, the small one for tensors below 1 MiB; tensors above
# 10 MiB have pieces of their own, in steps of the small one (c10/core/AllocatorConfig.h: kSmallBuffer, kLargeBuffer).
SMALL_PIECE = 2 * MIB
LARGE_PIECE = 20 * MIB
# The bytes that lie unused in pieces in use, as a share of the bytes of tensors. An H200 had 3.5 to 6 % in SFT and RL.
FRAGMENTATION = 0.06
NEW_CARDS = ("H100", "RTX 50")  # how the names of those cards of devices/cards.py begin that HOPPER is for
NOT_TENSORS = ("context", "graph pools", "fragmentation")  # parts that the allocator does not count as allocated


def of_this_card() -> Beside:
    """Returns the figures of the card in this machine; those of a laptop if there is none or one older than Hopper."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0):
        return HOPPER
    return LAPTOP


def of_card(name: str) -> Beside:
    """Returns the figures of a card of devices/cards.py, by its name there: those that a plan on this card has."""
    if name.startswith(NEW_CARDS):
        return HOPPER
    return LAPTOP


def beside_tensors(tensors: int, captured: int = 0, card: Beside = LAPTOP, pools: int = 1) -> dict[str, int]:
    """Returns bytes by part, in a phase with `tensors` bytes of tensors.

    `captured` is how many bytes of tensors a step that is run as CUDA graphs has; 0 if there is none. The graphs of a
    decoder share a pool, which no other tensor can use and which has a cuBLAS workspace of their own. `pools` is the
    number of decoders.
    """
    parts = {"context": card.context, "cuBLAS workspace": THREADS * card.workspace}
    if captured:
        pieces = -(-(captured + card.workspace) // SMALL_PIECE) * SMALL_PIECE
        parts["graph pools"] = pools * (SMALL_PIECE + max(LARGE_PIECE, pieces))
    return parts | {"fragmentation": int(tensors * FRAGMENTATION)}
