"""CUDA graphs: work that is captured once, as a list of kernels, and then started with one launch.

On a fast card, launching the kernels of a small piece of work one by one takes longer than running them.
"""

from collections.abc import Callable

import torch
from torch import Tensor


class Capture:
    """Captures CUDA graphs, which share one pool of memory."""

    def __init__(self):
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """Returns a function that runs `step` again on the same buffers, and the tensor that holds its result."""
        graph = torch.cuda.CUDAGraph()
        dtype = torch.get_autocast_dtype("cuda")
        enabled = torch.is_autocast_enabled("cuda")
        # Without autocast's cache: weights that it casts during a capture would stay in the graph's memory.
        # thread_local: other threads, such as a retriever's, may use CUDA during the capture.
        capture = torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local")
        with torch.autocast("cuda", dtype, enabled, cache_enabled=False), capture:
            result = step()
        return graph.replay, result


def raise_if_out_of_memory(error: RuntimeError) -> None:
    """Raises torch.OutOfMemoryError if a capture failed because PyTorch's allocator or the driver ran out of memory."""
    if _ran_out_of_memory(error):
        raise torch.OutOfMemoryError(f"out of memory for a CUDA graph: {error}") from error


def _ran_out_of_memory(error: BaseException | None) -> bool:
    """Returns whether `error` says that memory ran out.

    The errors during whose handling it was raised are examined, too: after an error in a capture, ending the capture
    may raise another one.
    """
    if error is None:
        return False
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
        return True
    return _ran_out_of_memory(error.__context__)
