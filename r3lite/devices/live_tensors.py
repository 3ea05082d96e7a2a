"""Bytes of live tensors, counted on any device: what a step really keeps, without what an allocator adds."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GRAIN = 512  # CUDA's allocator rounds up to it
MIB = 1 << 20


class LiveTensors(TorchDispatchMode):
    """Counts each tensor storage from the operator that makes or first touches it until it is freed.

    Views share their storage, which counts once. A storage that grows in place (`resize_`) counts with its new size. A
    storage that is resized without an operator (`untyped_storage().resize_`) counts with its new size from the next
    operator that touches it. What models/streaming.py keeps in the host's memory counts as `host`, on a CPU too, not as
    `live`.

    The mode sees the operators of the thread that entered it, and what autograd runs for a backward pass begun there:
    on a CPU in the same thread, on CUDA in threads that autograd hands the mode to. A tensor that another thread makes
    is missed until an operator here touches it. In r3lite only the encoder of queries makes such tensors, in the thread
    of `rollout/fetcher.py`. Memory inside an operator, of a library or of the allocator, is never seen; the process's
    own peak (VmHWM), which bench.memory shows besides, includes it.
    """

    def __init__(self):
        super().__init__()
        self.live = 0  # bytes, now
        self.peak = 0  # bytes, at most so far
        self.host = 0
        self.peak_host = 0
        self._sizes: dict[int, tuple[int, int]] = {}  # by storage: the device's bytes and the host's

    @property
    def peak_mib(self) -> float:
        return self.peak / MIB

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count((args, kwargs))
        result = function(*args, **(kwargs or {}))
        self.count(result)
        return result

    def count(self, tree) -> None:
        """Counts what is new among the tensors of a tree."""
        for tensor in tree_leaves(tree):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                key = storage._cdata
                size = -(-storage.nbytes() // GRAIN) * GRAIN
                host = size if getattr(storage, "is_host_part", False) else 0
                if key not in self._sizes:
                    weakref.finalize(storage, self._forget, key)
                self._replace(key, live=size - host, host=host)
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self._replace(key, live=0, host=0)
        del self._sizes[key]

    def _replace(
        self,
        key: int,
        live: int,
        host: int,
    ) -> None:
        old_live, old_host = self._sizes.get(key, (0, 0))
        self.live += live - old_live
        self.host += host - old_host
        self.peak_host = max(self.peak_host, self.host)
        self._sizes[key] = live, host
