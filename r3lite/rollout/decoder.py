"""One decoding step: runs the last token of each running row, and perhaps a draft, and returns the hidden states.

On CUDA the step is captured as a graph and replayed, because launching the kernels of one token takes longer than
running them. On other devices the model is called.

A graph reads tokens and positions from buffers of fixed shape. So there is a graph for each number of rows, of places
and of slots of the cache. The numbers of rows and of slots are rounded up to powers of two. A row's *places* are the
tokens that one replay runs of it: one, or several with drafts, the same number for all rows. Places that a row does not
need are padding.
"""

import math
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from r3lite.devices.cuda_graphs import Capture, raise_if_out_of_memory
from r3lite.models.attention import AttentionContext
from r3lite.models.causal_lm import CausalLM
from r3lite.models.delta_rows import DeltaRows
from r3lite.models.kv_cache import BLOCK, Decode, KVCache
from r3lite.models.verification import Verification
from r3lite.rollout.drafts import Drafter
from r3lite.settings.rollout import GRAPH_PLACES, MOST_DRAFTED

LEAST_COSINE = 0.999  # least cosine similarity between a graph's hidden states and those of a call of the model


class Decoder:
    """Runs one more token in each of the first rows of a cache, or several with a `drafter`."""

    def __init__(self, model: CausalLM, cache: KVCache, drafter: Drafter | None = None):
        self.model = model
        self.cache = cache
        self.drafter = drafter

    def __call__(self, tokens: list[int]) -> Tensor:
        """Runs token i in row i of the cache; returns the hidden states [n, C] after the n tokens."""
        context = self.cache.decode(len(tokens))
        ids = torch.tensor(tokens)[:, None]  # [n, 1], on the host, see CausalLM
        return self._run(ids, context)[:, 0]

    def draft_limit(self, rows: int) -> int:
        """Returns the most tokens that may be drafted for each row in a pass over `rows` rows."""
        return MOST_DRAFTED

    def run_drafts(self, additions: list[list[int]]) -> Tensor | None:
        """Runs the tokens `additions[i]` in row i of the cache; returns the hidden states [N, C] after all N tokens.

        The hidden states of a row follow those of the row before it. If one of them is not finite, returns None, and
        the cache is as before the call.
        """
        lengths = self.cache.lengths[: len(additions)]
        hidden = self._run_additions(additions)
        # The sum is finite if and only if all hidden states are: after the final norm they are too small to overflow.
        # It takes one kernel; `isfinite` takes four.
        if math.isfinite(hidden.sum(dtype=torch.float32)):
            return hidden
        for row, length in enumerate(lengths):
            self.cache.truncate(row, length)
            self.cache.wipe(row)
        return None

    def _run_additions(self, additions: list[list[int]]) -> Tensor:
        """Does what `run_drafts` does, but returns the hidden states [N, C] even if one is not finite."""
        context = Verification(self.cache, additions)
        return self._run(context.tokens, context)[0]

    def _run(self, ids: Tensor, context: AttentionContext) -> Tensor:
        """Returns the model's hidden states [B, T, C] for ids [B, T]."""
        # Without autocast: the base's weights have the run's dtype, and projections.project chooses an adapter's.
        with torch.autocast(self.cache.device.type, enabled=False):
            return self.model(ids, context)


class Graph(NamedTuple):
    """A captured step of B rows with T places each."""

    inputs: Tensor  # [2, B, T]: the buffer of tokens and positions, which reach the device in one transfer
    replay: Callable[[], object]  # runs the step on `inputs`
    hidden: Tensor  # [B, T, C]: the buffer of the result


class GraphDecoder(Decoder):
    """A decoder with CUDA graphs. All slots of the cache are allocated at once, so that its address does not change.

    Padding has the position of the cache's last slot, which no sequence uses: the last token of an episode is never
    run. Each new graph is compared with a call of the model. If the results differ, or if the graph cannot be captured,
    a warning is printed and the model is called from then on. If layers carry states, the model is called from the
    start. Errors of the model are raised. If a capture runs out of memory, torch.OutOfMemoryError is raised, because
    graphs of fewer rows may fit.
    """

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        slots: int,
        capture: Callable | None = None,
        drafter: Drafter | None = None,
    ):
        """`capture(step)` returns a function that runs `step` again, and the tensor with its result; see `Capture`."""
        super().__init__(model, cache, drafter)
        self.capture = capture or Capture()
        self.graphs: dict[tuple[int, int, int], Graph] = {}  # by (rows, places of a row, slots)
        # If False, the model is called. Layers with a gated delta rule choose on the host, at each step, the state from
        # which a row continues; a graph would repeat the choice of its capture.
        self.uses_graphs = not any(isinstance(layer, DeltaRows) for layer in cache.layers)
        if self.uses_graphs:
            cache.reserve(slots)
        self.slots = cache.capacity

    def __call__(self, tokens: list[int]) -> Tensor:
        places = 1
        if self.drafter:  # use the graph of passes with drafts, since the padding takes hardly any time
            places = 1 + self.draft_limit(len(tokens))
        hidden = self._replay([[token] for token in tokens], places=places)
        if hidden is None:
            return super().__call__(tokens)
        return hidden[:, 0]

    def draft_limit(self, rows: int) -> int:
        """Returns the most tokens that may be drafted for each row in a pass over `rows` rows.

        A graph with drafts has at most GRAPH_PLACES places in all its rows together; the last token of each row takes
        one.
        """
        if not self.uses_graphs:
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
        row_index, column_index = torch.tensor([rows, columns]).to(hidden.device, non_blocking=True)
        return hidden[row_index, column_index]

    def _replay(self, additions: list[list[int]], places: int) -> Tensor | None:
        """Runs the tokens `additions[i]` in row i; returns the hidden states [n, places, C] of the n rows.

        The lengths of the cache's rows count the tokens from now on. The places after a row's tokens are padding.
        Returns None if graphs cannot be used; then the lengths are as before.
        """
        if not self.uses_graphs:
            return None
        n = len(additions)
        lengths = self.cache.lengths
        graph_rows = self._padded_rows(n)
        padding_position = self.slots - 1
        tokens = []
        positions = []
        longest = 0
        for length, addition in zip(lengths, additions):  # `lengths` has all rows of the cache
            new_length = length + len(addition)
            padding_count = places - len(addition)
            tokens.append(addition + [0] * padding_count)
            positions.append([*range(length, new_length), *[padding_position] * padding_count])
            longest = max(longest, new_length)
        tokens += [[0] * places] * (graph_rows - n)
        positions += [[padding_position] * places] * (graph_rows - n)
        inputs = torch.tensor([tokens, positions])
        slots = min(BLOCK * _power_of_two(math.ceil(longest / BLOCK)), self.slots)
        key = (graph_rows, places, slots)
        if key not in self.graphs:
            graph = self._capture_graph(inputs, slots)
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
        """Returns the number of rows of the smallest graph that can run the first `n` rows of the cache."""
        return min(_power_of_two(n), len(self.cache.lengths))

    def _capture_graph(self, inputs: Tensor, slots: int) -> Graph | None:
        """Captures the graph of a step over tokens and positions [2, B, T]; returns None if it cannot be used.

        Runs the step, too: the keys and values of its tokens are then in the cache.
        """
        padding_position = self.slots - 1
        inputs = inputs.to(self.cache.device)
        is_compared = inputs[1] != padding_position  # [B, T]: False at padding

        def step() -> Tensor:
            # The context is made within the graph, so that each replay computes the mask from the new positions.
            context = Decode(self.cache, inputs[1], slots, padding=padding_position)
            return self.model(inputs[0], context)

        # The first call selects kernels, which a capture cannot do. Errors of the model are raised here.
        expected = step()
        # Hidden states that are not finite, perhaps because of a draft, cannot be compared: graphs stay in use, and a
        # later step is captured.
        if not expected[is_compared].isfinite().all():
            return None
        try:
            replay, hidden = self.capture(step)
        except RuntimeError as error:
            raise_if_out_of_memory(error)
            self._give_up(str(error))
            return None
        replay()
        cosines = F.cosine_similarity(hidden[is_compared].float(), expected[is_compared].float(), dim=-1)
        if not cosines.min() >= LEAST_COSINE:  # also true if a cosine is NaN
            self._give_up("they compute different numbers")
            return None
        return Graph(inputs, replay, hidden)

    def _give_up(self, reason: str) -> None:
        """Makes the decoder call the model instead of graphs from now on, and prints a warning with the reason."""
        print(f"warning: decoding continues without CUDA graphs: {reason}".splitlines()[0], file=sys.stderr)
        self.uses_graphs = False


def _power_of_two(number: int) -> int:
    """Returns the smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()
