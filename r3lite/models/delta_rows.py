"""What a layer with the gated delta rule carries in the rows of a KV cache: a state of each row, and its last tokens.

A state cannot be made younger. So what drafts change is not in it: they wait in a window, and the next pass begins with
those that were accepted. And a row can be copied as a whole only.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from r3lite.models.carried import Ring, RowPart
from r3lite.models.gated_delta import ChunkPlan, DeltaHeads, DeltaInputs, delta_chunks, delta_step


class RowTokens(NamedTuple):
    """Tokens that a pass gives to one row of a cache."""

    row: int
    start: int  # tokens of the row before them
    count: int


class StatePlaces:
    """Which tokens a pass runs in the layers of this kind, from which states, and which of them it leaves behind.

    The tokens of each row are a stretch (see ChunkPlan). It goes on from those that wait in the row's window, which are
    a stretch of their own, or else from the row's state.
    """

    def __init__(
        self,
        tokens: Sequence[RowTokens],
        settled: Sequence[int],
        drafts: bool,
        device: torch.device,
    ):
        """`settled`: how many tokens the state of each row has. `drafts`: the tokens may be taken back."""
        self.tokens = tokens
        self.drafts = drafts
        self.device = device
        waiting = []
        for row, start, _ in tokens:
            if start > settled[row]:
                waiting.append(RowTokens(row, settled[row], start - settled[row]))
        self.waiting_count = sum(part.count for part in waiting)
        self.waiting = self._in_window(waiting)
        self.rows = self._indices([part.row for part in tokens])
        self.is_step = not drafts and not waiting and all(part.count == 1 for part in tokens)
        if not self.is_step:
            self._plan(waiting)

    def _plan(self, waiting: Sequence[RowTokens]) -> None:
        stretches = {part.row: number for number, part in enumerate(waiting)}
        self.ends = list(stretches.items())  # rows, and the stretches whose last states are to be theirs
        sizes = [part.count for part in waiting]
        parents: list[int | None] = [None] * len(waiting)
        roots = [part.row for part in waiting]
        for part in self.tokens:
            parent = stretches.get(part.row)
            if parent is None:
                roots.append(part.row)
            if not self.drafts:
                self.ends.append((part.row, len(sizes)))
            sizes.append(part.count)
            parents.append(parent)
        self.roots = self._indices(roots)
        self.plan = ChunkPlan(sizes, parents, self.device)
        self.drafted = self._in_window(self.tokens)

    def _in_window(self, parts: Sequence[RowTokens]) -> tuple[Tensor, Tensor]:
        """Returns the rows [n] and the slots [n] of tokens in the windows."""
        rows = []
        slots = []
        for part in parts:
            rows.extend([part.row] * part.count)
            slots.extend(range(part.count))
        return self._indices(rows), self._indices(slots)

    def _indices(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long).to(self.device, non_blocking=True)


class DeltaRows(Ring):
    """The states of all rows [rows, H, D_k, D_v] in fp32, and the ring of the convolution before the rule."""

    def __init__(
        self,
        rows: int,
        heads: DeltaHeads,
        taps: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__(rows, sum(heads.sizes), taps, dtype=dtype, device=device)
        self.heads = heads
        self.states = torch.zeros(rows, *heads.state_shape, device=device)
        self.settled = [0] * rows  # how many tokens the state of each row has
        self.window = self._new_window(0)  # of each row the inputs of the tokens behind the settled ones

    def _new_window(self, size: int) -> DeltaInputs:
        rows = len(self.settled)
        return DeltaInputs(
            qkv=self.values.new_zeros(rows, size, sum(self.heads.sizes)),
            log_decay=self.states.new_zeros(rows, size, self.heads.values),
            strength=self.values.new_zeros(rows, size, self.heads.values),
        )

    def recall(self, inputs: DeltaInputs, places: StatePlaces) -> Tensor:
        """Runs the N tokens of a pass, whose outputs [N, H D_v] it returns, and leaves the rows' states behind."""
        if places.is_step:
            out, self.states[places.rows] = delta_step(inputs, self.states[places.rows], self.heads)
        else:
            waiting = [kept[places.waiting] for kept in self.window]
            joined = [torch.cat((old.to(new.dtype), new)) for old, new in zip(waiting, inputs, strict=True)]
            states = self.states[places.roots]
            out, end_states = delta_chunks(DeltaInputs(*joined), states, self.heads, places.plan)
            out = out[places.waiting_count :]
            for row, stretch in places.ends:
                self.states[row] = end_states[stretch]
        for row, start, count in places.tokens:
            self.settled[row] = start if places.drafts else start + count
        if places.drafts:
            self._keep(inputs, places)
        return out

    def _keep(self, inputs: DeltaInputs, places: StatePlaces) -> None:
        """Puts the inputs of drafts into the window."""
        longest = max(part.count for part in places.tokens)
        size = self.window.qkv.shape[1]
        if longest > size:
            wider = self._new_window(longest)
            for new, old in zip(wider, self.window, strict=True):
                new[:, :size] = old
            self.window = wider
        for kept, tensor in zip(self.window, inputs, strict=True):
            kept[places.drafted] = tensor.to(kept.dtype)

    def _saved_tokens(self, parts: Sequence[RowPart]) -> list[tuple[int, int, int, int]]:
        return []  # a ring is of no use without the state

    def reserve(self, capacity: int) -> None:
        """A state takes no more memory for more tokens."""

    def copyable(self, count: int, length: int, read: int) -> int:
        return count if count == length else 0

    def copy(
        self,
        source: int,
        target: int,
        count: int,
        length: int,
    ) -> None:
        if count == 0:
            self.truncate(target, 0, old_length=0)
            return
        assert count == length, "this prefix is not copyable"
        for tensor in (self.values, self.states, *self.window):
            tensor[target] = tensor[source]
        self.settled[target] = self.settled[source]

    def swap(self, i: int, j: int, used: int) -> None:
        for tensor in (self.values, self.states, *self.window):
            tensor[[i, j]] = tensor[[j, i]]
        self.settled[i], self.settled[j] = self.settled[j], self.settled[i]

    def truncate(self, row: int, length: int, old_length: int) -> None:
        if length == 0:
            self.states[row] = 0
            self.settled[row] = 0
        assert length >= self.settled[row], "only drafts, or all tokens, can be taken back"

    def clear(self, row: int) -> None:
        self.values[row] = 0
        for tensor in self.window:
            tensor[row] = 0
        self.truncate(row, 0, old_length=0)
