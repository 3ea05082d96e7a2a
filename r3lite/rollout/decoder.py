"""One decoding step: runs the last token of each running row, and perhaps a draft, and returns the hidden states.

On CUDA the step is captured as a graph and replayed, because launching the kernels of one token takes longer than
running them. A graph has fixed shapes, so there is one for each bucket of rows and of slots, both powers of two. It
reads tokens and positions from buffers. With drafts, a graph runs several tokens of each row, of all rows the same
number: its *places*. Those that a row does not need are padding. On other devices the model is called.
"""

import math
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from r3lite.models.attention import AttentionContext
from r3lite.models.causal_lm import CausalLM
from r3lite.models.delta_rows import DeltaRows
from r3lite.models.kv_cache import BLOCK, Decode, KVCache
from r3lite.models.verification import Verification
from r3lite.rollout.drafts import Drafter
from r3lite.settings.rollout import GRAPH_PLACES, MOST_DRAFTED

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

    def draft_limit(self, rows: int) -> int:
        """Returns the most tokens that may be drafted for each of so many rows."""
        return MOST_DRAFTED

    def run_drafts(self, additions: list[list[int]]) -> Tensor | None:
        """Returns the hidden states [N, C] after some more tokens in each of the first rows, laid end to end.

        Returns None if they are not all finite. The cache then is as before.
        """
        lengths = self.cache.lengths[: len(additions)]
        hidden = self._run_additions(additions)
        if hidden.isfinite().all():
            return hidden
        for row, length in enumerate(lengths):
            self.cache.truncate(row, length)
            self.cache.wipe(row)
        return None

    def _run_additions(self, additions: list[list[int]]) -> Tensor:
        """Returns the hidden states [N, C] after tokens that are added to each of the first rows, finite or not."""
        context = Verification(self.cache, additions)
        return self._run(context.tokens, context)[0]

    def _run(self, ids: Tensor, context: AttentionContext) -> Tensor:
        # The base is in the run's dtype anyway; projections.project chooses the dtype of an adapter's products.
        with torch.autocast(self.cache.device.type, enabled=False):
            return self.model(ids, context)


class Graph(NamedTuple):
    """A captured step of B rows with T places each."""

    inputs: Tensor  # [2, B, T]: tokens and positions, which reach the device in one transfer
    replay: Callable[[], object]
    hidden: Tensor  # [B, T, C]


class GraphDecoder(Decoder):
    """A decoder with CUDA graphs. All slots of the cache are allocated at once, so that its address does not change.

    Places that pad a graph are at the position of the last slot, which no sequence uses: an episode's last token is
    never run. `capture(step)` returns a function that runs `step` again, and the tensor with its result. Each new graph
    is compared with the model. If it differs, or cannot be captured, a warning is printed and the model is called from
    then on. If layers carry states, the model is called from the start. Errors of the model are raised, and
    torch.OutOfMemoryError if a capture runs out of memory: with fewer rows, graphs fit.
    """

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        slots: int,
        capture: Callable | None = None,
        drafter: Drafter | None = None,
    ):
        super().__init__(model, cache, drafter)
        cache.reserve(slots)
        self.slots = cache.capacity
        self.capture = capture or Capture()
        self.graphs: dict[tuple[int, int, int], Graph] = {}  # by rows, places of a row, and slots
        # Layers with a gated delta rule choose on the host, at each step, the state that a row goes on from. A graph
        # would repeat one choice.
        self.works = not any(isinstance(layer, DeltaRows) for layer in cache.layers)

    def __call__(self, tokens: list[int]) -> Tensor:
        places = 1
        if self.drafter:  # the graph of passes with drafts serves both: a few more places take no time
            places = 1 + self.draft_limit(len(tokens))
        hidden = self._replay([[token] for token in tokens], places=places)
        if hidden is None:
            return super().__call__(tokens)
        return hidden[:, 0]

    def draft_limit(self, rows: int) -> int:
        """Returns the most tokens that may be drafted for each of so many rows.

        The rows of a graph share GRAPH_PLACES, and the last token of each row takes one of them.
        """
        if not self.works:
            return super().draft_limit(rows)
        limit = max(0, GRAPH_PLACES // self._padded_rows(rows) - 1)
        if self.drafter:
            limit = min(limit, self.drafter.limit)
        return limit

    def _run_additions(self, additions: list[list[int]]) -> Tensor:
        hidden = self._replay(additions, places=1 + self.draft_limit(len(additions)))
        if hidden is None:
            return super()._run_additions(additions)
        rows: list[int] = []
        columns: list[int] = []
        for row, addition in enumerate(additions):
            rows.extend([row] * len(addition))
            columns.extend(range(len(addition)))
        index = torch.tensor([rows, columns]).to(hidden.device, non_blocking=True)
        return hidden[index[0], index[1]]

    def _replay(self, additions: list[list[int]], places: int) -> Tensor | None:
        """Returns the hidden states [n, places, C] after tokens that are added to each of the first n rows.

        The rows' lengths count them from now on. Places behind a row's tokens are padding. Returns None if graphs
        cannot be used; then the lengths are as before.
        """
        if not self.works:
            return None
        n = len(additions)
        lengths = self.cache.lengths
        rows = self._padded_rows(n)
        padding = self.slots - 1
        tokens = []
        positions = []
        for length, addition in zip(lengths, additions):
            filling = places - len(addition)
            tokens.append(addition + [0] * filling)
            positions.append([*range(length, length + len(addition)), *[padding] * filling])
        tokens += [[0] * places] * (rows - n)
        positions += [[padding] * places] * (rows - n)
        inputs = torch.tensor([tokens, positions])
        longest = max(length + len(addition) for length, addition in zip(lengths, additions))
        slots = min(BLOCK * _power_of_two(math.ceil(longest / BLOCK)), self.slots)
        key = (rows, places, slots)
        if key not in self.graphs:
            graph = self._captured(inputs, slots)
            if graph is None:
                return None
            self.graphs[key] = graph
        graph = self.graphs[key]
        graph.inputs.copy_(inputs, non_blocking=True)
        graph.replay()
        for row, addition in enumerate(additions):
            lengths[row] += len(addition)
        return graph.hidden[:n]

    def _padded_rows(self, n: int) -> int:
        """Returns the rows of the smallest graph for the first `n` rows of the cache."""
        return min(_power_of_two(n), len(self.cache.lengths))

    def _captured(self, inputs: Tensor, slots: int) -> Graph | None:
        """Returns the graph of a step over tokens and positions [2, B, T]; None if it may not be used, now or ever."""
        padding = self.slots - 1
        inputs = inputs.to(self.cache.device)
        is_compared = inputs[1] != padding

        def step() -> Tensor:
            # The context is made within the graph, so that each replay computes the mask from the new positions.
            context = Decode(self.cache, inputs[1], slots, padding=padding)
            return self.model(inputs[0], context)

        # The first call selects kernels, which a capture cannot do. Errors of the model are raised here.
        expected = step()
        # Numbers that are not finite, perhaps because of a draft, cannot be compared: another step will be captured.
        if not expected[is_compared].isfinite().all():
            return None
        try:
            replay, hidden = self.capture(step)
        except RuntimeError as error:
            if _ran_out_of_memory(error):
                raise torch.OutOfMemoryError(f"out of memory for a CUDA graph: {error}") from error
            self._give_up(str(error))
            return None
        replay()
        cosines = F.cosine_similarity(hidden[is_compared].float(), expected[is_compared].float(), dim=-1)
        if not cosines.min() >= LEAST_COSINE:  # a NaN is refused, too
            self._give_up("they compute different numbers")
            return None
        return Graph(inputs, replay, hidden)

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
