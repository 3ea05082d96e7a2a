"""Bytes of live tensors, counted on any device: what a step really holds, without what an allocator adds."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GRAIN = 512  # bytes: CUDA's allocator rounds each tensor up to a multiple of this, and so do all figures here
MIB = 1 << 20


class LiveTensors(TorchDispatchMode):
    """Counts each tensor storage from the operator that makes or first touches it until it is freed.

    Views share their storage, which counts once. A storage that grows in place (`resize_`) counts with its new size. A
    storage that is resized without an operator (`untyped_storage().resize_`) counts with its new size from the next
    operator that touches it. What models/streaming.py keeps in the host's memory counts as `host`, not as `live`, on a
    CPU too.

    The mode sees the operators of the thread that entered it. It also sees the operators of a backward pass that began
    in this thread: on a CPU autograd runs them in the same thread, on CUDA in threads to which it passes the mode. A
    tensor that another thread makes is missed until an operator here touches it. In r3lite only the encoder of queries
    makes such tensors, in the thread of `rollout/fetcher.py`. Temporary memory inside an operator is never seen, nor is
    that of libraries or of the allocator; it is in the peak of the process (VmHWM), which bench.memory shows beside
    this count.
    """

    def __init__(self):
        super().__init__()
        # All in bytes. A peak is the largest count so far.
        self.live = 0
        self.peak = 0
        self.host = 0
        self.peak_host = 0
        self._sizes: dict[int, tuple[int, int]] = {}  # by storage: what it adds to `live` and to `host`

    @property
    def peak_mib(self) -> float:
        return self.peak / MIB

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count((args, kwargs))
        result = function(*args, **(kwargs or {}))
        self.count(result)
        return result

    def count(self, tree) -> None:
        """Counts the tensors in a tree (nested lists and dictionaries), each storage only once."""
        for tensor in tree_leaves(tree):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                key = storage._cdata  # the address of the storage's C++ object
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
