"""Tensors that lie one after another in memory, so that they can be used one by one or as one.

The weights of linear layers that read the same x are such tensors: each keeps its published name, and all are
multiplied by x at once. Knows nothing of what the tensors are for.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

STACKS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # layers that read the same x


def side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors [n, ...] as one [sum of n, ...]: a view if they lie one after another in memory, or else a copy."""
    view = adjacent(tensors)
    return torch.cat(tuple(tensors)) if view is None else view


def adjacent(tensors: Sequence[Tensor]) -> Tensor | None:
    """A view of tensors [n, ...] as one [sum of n, ...], if they lie one after another in memory."""
    first, rows = tensors[0], 0
    if len(tensors) == 1:
        return first
    storage, start = first.untyped_storage().data_ptr(), first.data_ptr()
    size = first.stride(0) * first.element_size()
    for tensor in tensors:
        there = tensor.data_ptr() == start + rows * size and tensor.untyped_storage().data_ptr() == storage
        if not (there and tensor.is_contiguous()):
            return None
        rows += len(tensor)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def stacks(paths: Iterable[str]) -> list[list[str]]:
    """Paths of layers, those of one parent together that are in one of STACKS."""
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for path in paths:
        parent, _, name = path.rpartition(".")
        found.setdefault((parent, next((stack for stack in STACKS if name in stack), (name,))), []).append(path)
    return list(found.values())


def stacked(shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """New tensors without values, of shapes [n, ...] that differ in n alone, which lie one after another in memory."""
    rows = [shape[0] for shape in shapes]
    return list(torch.empty(sum(rows), *shapes[0][1:], dtype=dtype, device=device).split(rows))


class StackMemory:
    """Memory for the tensors of a model, by name; those of one of STACKS lie one after another.

    It is allocated when it is first asked for, so that never much more is held than what has been read.
    """

    def __init__(self, tensors: dict[str, Tensor], dtype: torch.dtype, device: torch.device):
        self.tensors, self.dtype, self.device = tensors, dtype, device
        self.found: dict[str, Tensor] = {}
        self.beside: dict[str, list[str]] = {}  # the names of one stack, by each of them
        kinds = defaultdict(list)
        for name in tensors:
            path, _, kind = name.rpartition(".")
            kinds[kind].append(path)
        for kind, paths in kinds.items():
            for stack in stacks(paths):
                names = [f"{path}.{kind}" for path in stack]
                self.beside |= dict.fromkeys(names, names)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.found:
            names = self.beside[name]
            like = self.tensors[name]
            dtype = self.dtype if isinstance(like, nn.Parameter) else like.dtype
            together = stacked([self.tensors[n].shape for n in names], dtype, self.device)
            self.found |= dict(zip(names, together, strict=True))
        return self.found[name]
