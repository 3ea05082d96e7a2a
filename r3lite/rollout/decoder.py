"""One step of decoding: the last tokens of the rows at work in, their hidden states out.

On CUDA the step is captured as a graph and replayed: the kernels of one token are so short that launching them takes
longer than running them. A graph has fixed shapes, so there is one for each bucket of rows and of slots, powers of two,
and it reads tokens and positions from buffers. Elsewhere the model is called.
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from r3lite.models.kv_cache import BLOCK, KVCache, Step
from r3lite.models.qwen2 import Qwen2

ALIKE = 0.999  # cosine of what a graph and the model itself must give at least


class Decoder:
    """Runs the rows 0 .. n-1 of a cache by one token each."""

    def __init__(self, model: Qwen2, cache: KVCache):
        self.model, self.cache = model, cache

    def __call__(self, tokens: list[int]) -> Tensor:
        """Hidden states [n, C] after one more token in each of the first n rows."""
        step = self.cache.step(len(tokens))
        ids = torch.tensor(tokens, device=self.cache.device)[:, None]
        # The base is in the run's dtype anyway; adapters are as functions.adapted_linear wants them.
        with torch.autocast(ids.device.type, enabled=False):
            hidden = self.model(ids, step)[:, 0]
        step.end()
        return hidden


class GraphDecoder(Decoder):
    """The same by graphs. The cache is given all its slots at once and keeps its place in memory.

    Rows that only fill a bucket up write to the last slot: no row gets there, for nothing follows its last token.
    `capture` makes of a function that fills a tensor one that does it again. The first graph is held against the model
    itself; where it differs or cannot be captured, a warning is printed and the model is called from then on.
    """

    def __init__(self, model: Qwen2, cache: KVCache, slots: int, capture: Callable | None = None):
        super().__init__(model, cache)
        cache.reserve(slots)
        self.slots = cache.keys[0].shape[2]
        self.capture = capture or Capture()
        self.graphs: dict[tuple[int, int], tuple[Callable[[], object], Tensor]] = {}
        self.ids = torch.zeros(len(cache.lengths), 1, dtype=torch.long, device=cache.device)
        self.positions = torch.zeros_like(self.ids)
        self.works = True

    def __call__(self, tokens: list[int]) -> Tensor:
        if not self.works:
            return super().__call__(tokens)
        n, lengths = len(tokens), self.cache.lengths
        rows = min(1 << (n - 1).bit_length(), len(lengths))
        blocks = -(-(max(lengths[:n]) + 1) // BLOCK)
        used = min(BLOCK << (blocks - 1).bit_length(), self.slots)
        spare = [self.slots - 1] * (rows - n)
        self.ids[:n] = torch.tensor(tokens)[:, None]
        self.positions[:rows] = torch.tensor(lengths[:n] + spare)[:, None]
        if (rows, used) not in self.graphs and not self._add(rows, used):
            return super().__call__(tokens)
        replay, hidden = self.graphs[rows, used]
        replay()
        for row in range(n):
            lengths[row] += 1
        return hidden[:n, 0]

    def _add(self, rows: int, used: int) -> bool:
        """Captures the graph of a bucket; whether it may be used."""

        def work() -> Tensor:
            return self.model(self.ids[:rows], Step(self.cache, self.positions[:rows], used))

        try:
            expected = work()  # kernels are chosen in the first call, which a capture does not survive
            replay, hidden = self.capture(work)
        except RuntimeError as error:
            print(f"warning: decoding goes on without CUDA graphs: {error}".splitlines()[0], file=sys.stderr)
            self.works = False
            return False
        if not self.graphs:
            replay()
            likeness = torch.nn.functional.cosine_similarity(hidden.float(), expected.float(), dim=-1).min()
            if not likeness >= ALIKE:
                print("warning: decoding goes on without CUDA graphs: theirs are other numbers", file=sys.stderr)
                self.works = False
                return False
        self.graphs[rows, used] = replay, hidden
        return True


class Capture:
    """Captures CUDA graphs, all in one pool of memory."""

    def __init__(self):
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        graph = torch.cuda.CUDAGraph()
        dtype, enabled = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")
        # Weights that autocast keeps from a capture would be in the graph's memory.
        # Other threads may use CUDA meanwhile: a retriever's.
        how = {"pool": self.pool, "capture_error_mode": "thread_local"}
        with torch.autocast("cuda", dtype, enabled, cache_enabled=False), torch.cuda.graph(graph, **how):
            result = work()
        return graph.replay, result
