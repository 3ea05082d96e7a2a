"""One decoding step: runs the last token of each running row, returns the hidden states.

On CUDA the step is captured as a graph and replayed, because launching the kernels of one token takes longer than
running them. A graph has fixed shapes, so there is one for each bucket of rows and of slots, both powers of two; it
reads tokens and positions from buffers. On other devices the model is called.
"""

import math
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from r3lite.models.attention import AttentionContext
from r3lite.models.causal_lm import CausalLM
from r3lite.models.delta_rows import DeltaRows
from r3lite.models.kv_cache import BLOCK, Decode, KVCache
from r3lite.models.verification import Verification
from r3lite.rollout.drafts import Drafter

LEAST_COSINE = 0.999  # between the hidden states of a graph and those of the model itself


class Decoder:
    """Runs one more token in each of the rows 0 .. n-1 of a cache, or with a `drafter` some more."""

    def __init__(self, model: CausalLM, cache: KVCache, drafter: Drafter | None = None):
        self.model = model
        self.cache = cache
        self.drafter = drafter

    def __call__(self, tokens: list[int]) -> Tensor:
        """Returns the hidden states [n, C] after one more token in each of the first n rows."""
        context = self.cache.decode(len(tokens))
        ids = torch.tensor(tokens)[:, None]  # on the host, see CausalLM
        return self._run(ids, context)[:, 0]

    def run_drafts(self, additions: list[list[int]]) -> Tensor | None:
        """Returns the hidden states [N, C] after some more tokens in each of the first rows, laid end to end.

        If they are not all finite, the cache is as before, and there are none.
        """
        lengths = self.cache.lengths[: len(additions)]
        context = Verification(self.cache, additions)
        hidden = self._run(context.tokens, context)[0]
        if hidden.isfinite().all():
            return hidden
        for row, length in enumerate(lengths):
            self.cache.truncate(row, length)
            self.cache.wipe(row)
        return None

    def _run(self, ids: Tensor, context: AttentionContext) -> Tensor:
        # The base is in the run's dtype anyway; projections.project chooses the dtype of an adapter's products.
        with torch.autocast(self.cache.device.type, enabled=False):
            return self.model(ids, context)


class GraphDecoder(Decoder):
    """A decoder with CUDA graphs. All slots of the cache are allocated at once, so that its address does not change.

    Rows that pad a bucket write to the last slot, which no sequence uses: an episode's last token is never run.
    `capture(step)` returns a function that runs `step` again, and the tensor with its result. Each new graph is
    compared with the model. If it differs, or cannot be captured, a warning is printed and the model is called from
    then on. If layers carry states, it is called from the start. Errors of the model are raised, and
    torch.OutOfMemoryError if a capture runs out of memory: with fewer rows, graphs fit.
    """

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        slots: int,
        capture: Callable | None = None,
    ):
        super().__init__(model, cache)
        cache.reserve(slots)
        self.slots = cache.capacity
        self.capture = capture or Capture()
        self.graphs: dict[tuple[int, int], tuple[Callable[[], object], Tensor]] = {}
        # Tokens and positions, which reach the device in one transfer.
        rows = len(cache.lengths)
        self.inputs = torch.zeros(2, rows, 1, dtype=torch.long, device=cache.device)
        # What a row's state goes on from differs from step to step, and a graph cannot ask.
        self.works = not any(isinstance(layer, DeltaRows) for layer in cache.layers)

    def __call__(self, tokens: list[int]) -> Tensor:
        if not self.works:
            return super().__call__(tokens)
        n = len(tokens)
        lengths = self.cache.lengths
        rows, slots = self._bucket(n)
        padding = rows - n
        padded_tokens = tokens + [0] * padding
        padded_positions = lengths[:n] + [self.slots - 1] * padding
        inputs = torch.tensor([padded_tokens, padded_positions])
        self.inputs[:, :rows, 0].copy_(inputs, non_blocking=True)
        if (rows, slots) not in self.graphs:
            usable = self._add_graph(n, rows, slots)
            if not usable:
                return super().__call__(tokens)
        replay, hidden = self.graphs[rows, slots]
        replay()
        for row in range(n):
            lengths[row] += 1
        return hidden[:n, 0]

    def _bucket(self, n: int) -> tuple[int, int]:
        """Returns the rows and the slots of the smallest graph for the first `n` rows of the cache."""
        lengths = self.cache.lengths
        longest = max(lengths[:n]) + 1
        blocks = math.ceil(longest / BLOCK)
        rows = min(_power_of_two(n), len(lengths))
        slots = min(BLOCK * _power_of_two(blocks), self.slots)
        return rows, slots

    def _add_graph(self, n: int, rows: int, slots: int) -> bool:
        """Captures the graph of a bucket, whose first `n` rows are at work; returns whether it may be used."""

        def step() -> Tensor:
            # The context is made within the graph, so that each replay computes the mask from the new positions.
            context = Decode(self.cache, self.inputs[1, :rows], slots, padding=self.slots - 1)
            return self.model(self.inputs[0, :rows], context)

        # The first call selects kernels, which a capture cannot do. Errors of the model are raised here.
        expected = step()
        try:
            replay, hidden = self.capture(step)
        except RuntimeError as error:
            if _ran_out_of_memory(error):
                raise torch.OutOfMemoryError(f"out of memory for a CUDA graph: {error}") from error
            self._give_up(str(error))
            return False
        replay()
        cosines = F.cosine_similarity(hidden[:n].float(), expected[:n].float(), dim=-1)
        if not cosines.min() >= LEAST_COSINE:  # a NaN is refused, too
            self._give_up("they compute different numbers")
            return False
        self.graphs[rows, slots] = replay, hidden
        return True

    def _give_up(self, reason: str) -> None:
        """Has the model called from now on, and prints why."""
        print(f"warning: decoding continues without CUDA graphs: {reason}".splitlines()[0], file=sys.stderr)
        self.works = False


def _power_of_two(number: int) -> int:
    """Returns the smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


def _ran_out_of_memory(error: BaseException | None) -> bool:
    """Returns whether memory ran out, of PyTorch's allocator or of the driver.

    The error before it counts too: ending a capture in which an error was raised may raise another one.
    """
    if error is None:
        return False
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
        return True
    return _ran_out_of_memory(error.__context__)


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
