"""Bytes of live tensors, counted on any device: what a step really holds, without what an allocator adds."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

GRAIN = 512  # bytes: CUDA's allocator rounds each tensor up to a multiple of this, and so do all figures here
MIB = 1 << 20


def tensors_in(tree: Any) -> list[Tensor]:
    """Returns the tensors in nested lists, tuples and dictionaries: in the arguments or the result of an operator."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        branches = tree.values()
    elif isinstance(tree, (list, tuple)):
        branches = tree
    else:
        return []
    return [tensor for branch in branches for tensor in tensors_in(branch)]


class UncompiledMode(TorchDispatchMode):
    """A mode without PyTorch's wrapper for torch.compile.

    At the first operator the wrapper imports the compiler, which takes a second, and it makes each operator slower.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class LiveTensors(UncompiledMode):
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

    def count(self, tree: Any) -> None:
        """Counts the tensors in nested lists, tuples and dictionaries, each storage only once."""
        for tensor in tensors_in(tree):
            if tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata  # the address of the storage's C++ object
            size = -(-storage.nbytes() // GRAIN) * GRAIN
            host = size if getattr(storage, "is_host_part", False) else 0
            if key not in self._sizes:
                weakref.finalize(storage, self._forget, key)
            if self._sizes.get(key) != (size - host, host):
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
