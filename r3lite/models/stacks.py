"""Tensors that lie one after another in memory, so that they can be used one by one or as one.

The weights of linear layers that read the same x are such tensors: each keeps its published name, and all are
multiplied by x at once. Knows nothing of what the tensors are for.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

# Layers that read the same x.
STACKS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
)


def side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    """Returns tensors [n, ...] as one [sum of n, ...]: a view if they lie one after another in memory, else a copy."""
    view = adjacent(tensors)
    if view is None:
        return torch.cat(tuple(tensors))
    return view


def adjacent(tensors: Sequence[Tensor]) -> Tensor | None:
    """Returns a view of tensors [n, ...] as one [sum of n, ...], or None if they do not lie one after another."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    storage = first.untyped_storage().data_ptr()
    start = first.data_ptr()
    row_bytes = first.stride(0) * first.element_size()
    rows = 0
    for tensor in tensors:
        follows = tensor.data_ptr() == start + rows * row_bytes
        if not follows or tensor.untyped_storage().data_ptr() != storage or not tensor.is_contiguous():
            return None
        rows += len(tensor)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def stacks(paths: Iterable[str]) -> list[list[str]]:
    """Groups the paths of layers: layers of one parent are in one group if their names are in one of STACKS."""
    by_stack: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for path in paths:
        parent, _, name = path.rpartition(".")
        stack = next((stack for stack in STACKS if name in stack), (name,))
        by_stack.setdefault((parent, stack), []).append(path)
    return list(by_stack.values())


def stacked(
    shapes: Sequence[Sequence[int]],
    dtype: torch.dtype,
    device: torch.device,
) -> list[Tensor]:
    """Returns new tensors without values, of shapes [n, ...] that differ in n alone, one after another in memory."""
    rows = [shape[0] for shape in shapes]
    memory = torch.empty(sum(rows), *shapes[0][1:], dtype=dtype, device=device)
    return list(memory.split(rows))


class StackMemory:
    """Memory for the tensors of a model, by name. The tensors of layers that `stacks` groups lie one after another.

    A tensor's memory is allocated when it is first asked for, so that never much more is held than has been read.
    """

    def __init__(
        self,
        tensors: dict[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.tensors = tensors
        self.dtype = dtype
        self.device = device
        self.allocated: dict[str, Tensor] = {}
        self.stack_names: dict[str, list[str]] = {}  # for each name, all names of its stack
        paths_by_kind = defaultdict(list)  # a kind is the last part of a name, such as weight or bias
        for name in tensors:
            path, _, kind = name.rpartition(".")
            paths_by_kind[kind].append(path)
        for kind, paths in paths_by_kind.items():
            for stack in stacks(paths):
                names = [f"{path}.{kind}" for path in stack]
                self.stack_names |= dict.fromkeys(names, names)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.allocated:
            names = self.stack_names[name]
            shapes = [self.tensors[stack_name].shape for stack_name in names]
            memory = stacked(shapes, self.dtype_of(name), self.device)
            self.allocated |= dict(zip(names, memory, strict=True))
        return self.allocated[name]

    def dtype_of(self, name: str) -> torch.dtype:
        """Returns the dtype in which a tensor is held: the model's if it is a parameter, or else its own."""
        tensor = self.tensors[name]
        return self.dtype if isinstance(tensor, nn.Parameter) else tensor.dtype
