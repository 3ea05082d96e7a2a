"""Bytes of live tensors, counted on any device: what a step really keeps, whatever an allocator adds."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GRAIN = 512  # CUDA's allocator rounds up to it
MIB = 1 << 20


class LiveTensors(TorchDispatchMode):
    """Counts each tensor storage from the operator that makes or first touches it until it is freed."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}

    @property
    def peak_mib(self) -> float:
        return self.peak / MIB

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self._count((args, kwargs))
        result = function(*args, **(kwargs or {}))
        self._count(result)
        return result

    def _count(self, tree) -> None:
        for tensor in tree_leaves(tree):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                if storage._cdata not in self._sizes:
                    self._add(storage)

    def _add(self, storage) -> None:
        key, size = storage._cdata, -(-storage.nbytes() // GRAIN) * GRAIN
        self._sizes[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)

        def freed() -> None:
            self.live -= size
            del self._sizes[key]

        weakref.finalize(storage, freed)
