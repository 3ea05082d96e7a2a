"""A stack for activations in the host's memory: the last one put is the first one taken, as a backward pass needs it.

Copies run beside the computation, on a stream of their own. The memory is pinned if the system allows it; WSL and
containers may refuse, and then it is pageable: copies are slower, results the same.
"""

import sys

import torch
from torch import Tensor


class Offload:
    """A stack of tensors of one device in the host's memory. While one is used, the next one is copied back."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.pinned = device.type == "cuda"
        self.stack: list[Tensor] = []
        self.coming: Tensor | None = None  # the next one to be taken, on the device or being copied there

    def put(self, x: Tensor) -> None:
        """Copies x to the host; its memory on the device is freed when nothing else refers to x."""
        assert self.coming is None, "all that was put must be taken before more is put"
        host = self._host_memory(x)
        if self.stream is None:
            host.copy_(x)
        else:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.stream):
                host.copy_(x, non_blocking=self.pinned)
            x.record_stream(self.stream)
        self.stack.append(host)

    def take(self) -> Tensor:
        """Returns the tensor that was put last, on the device."""
        x = self._fetch() if self.coming is None else self.coming
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
            x.record_stream(torch.cuda.current_stream(self.device))
        self.coming = self._fetch() if self.stack else None
        return x

    def _fetch(self) -> Tensor:
        host = self.stack.pop()
        if self.stream is None:
            return host.to(self.device, copy=True)
        with torch.cuda.stream(self.stream):
            return host.to(self.device, non_blocking=self.pinned)

    def _host_memory(self, x: Tensor) -> Tensor:
        if self.pinned:
            try:
                return torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            except RuntimeError:
                self.pinned = False
                print("warning: memory cannot be pinned here; offloading is slower", file=sys.stderr)
        return torch.empty(x.shape, dtype=x.dtype)
