"""What a layer with the gated delta rule carries in the rows of a KV cache: a state of each row, and its last tokens.

A state cannot be rolled back to fewer tokens. So drafts do not update the state: their inputs wait in the window of
their row, and the next pass first runs the drafts that were accepted. For the same reason a row can only be copied
whole.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from r3lite.models.carried import Ring, RowPart, exchange
from r3lite.models.gated_delta import ChunkPlan, DeltaHeads, DeltaInputs, delta_chunks, delta_step


class RowTokens(NamedTuple):
    """Tokens that follow one another in one row of a cache."""

    row: int
    start: int  # the position of the first of them, which is how many tokens of the row come before
    count: int


class DeltaPass:
    """The plan of one pass, for all layers with the delta rule: which tokens it runs, and which states it stores.

    In each row the waiting tokens, which are those in its window, are run first, from the row's state; then the new
    tokens of the pass. The waiting tokens are one stretch of a ChunkPlan, the new tokens another. The state after the
    new tokens is stored. If the new tokens are drafts, the state before them is stored instead, and their inputs are
    put into the window.

    For example, row 0 has two waiting tokens and row 1 none, and both get one new token. The stretches are then: 0, the
    two waiting tokens; 1, the new token of row 0, with the parent 0; 2, the new token of row 1. The roots 0 and 2 begin
    at the states of rows 0 and 1. The stretches 1 and 2 end at the new states; with drafts, only stretch 0 does.
    """

    def __init__(
        self,
        tokens: Sequence[RowTokens],
        settled: Sequence[int],
        drafts: bool,
        device: torch.device,
    ):
        """`tokens`: the new tokens of each row. `settled`: how many tokens each row's state has taken in.

        `drafts`: whether the new tokens are drafts, which may be taken back.
        """
        self.tokens = tokens
        self.drafts = drafts
        self.device = device
        waiting = []
        for row, start, _ in tokens:
            if start > settled[row]:
                waiting.append(RowTokens(row, settled[row], start - settled[row]))
        self.waiting_count = sum(part.count for part in waiting)
        self.waiting_slots = self._in_window(waiting)
        self.rows = self._indices([part.row for part in tokens])  # those that get new tokens
        one_token_each = all(part.count == 1 for part in tokens)
        self.is_step = one_token_each and not drafts and not waiting  # `delta_step` suffices, without stretches
        if not self.is_step:
            self._plan_stretches(waiting)

    def _plan_stretches(self, waiting: Sequence[RowTokens]) -> None:
        """Makes the plan of the stretches: first those of the waiting tokens, then those of the new tokens."""
        stretch_of_waiting = {part.row: stretch for stretch, part in enumerate(waiting)}
        self.end_stretches = dict(stretch_of_waiting)  # by row: the stretch whose end state is stored
        sizes = [part.count for part in waiting]
        parents: list[int | None] = [None] * len(waiting)
        root_rows = [part.row for part in waiting]  # for each root, the row whose state it starts from
        for part in self.tokens:
            parent = stretch_of_waiting.get(part.row)
            if parent is None:
                root_rows.append(part.row)
            if not self.drafts:
                self.end_stretches[part.row] = len(sizes)
            sizes.append(part.count)
            parents.append(parent)
        self.root_rows = self._indices(root_rows)
        self.chunks = ChunkPlan(sizes, parents, self.device)
        self.draft_slots = self._in_window(self.tokens)

    def _in_window(self, parts: Sequence[RowTokens]) -> tuple[Tensor, Tensor]:
        """Returns the rows [n] and the slots [n] of tokens in the windows: those of a row fill its slots 0, 1, 2 .."""
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
        self.window = self._new_window(0)  # for each row, the inputs of the tokens that are not in its state yet

    def _new_window(self, size: int) -> DeltaInputs:
        """Returns a window with zeros for `size` tokens of each row."""
        rows = len(self.states)
        return DeltaInputs(
            qkv=self.values.new_zeros(rows, size, sum(self.heads.sizes)),
            log_decay=self.states.new_zeros(rows, size, self.heads.value_heads),
            strength=self.values.new_zeros(rows, size, self.heads.value_heads),
        )

    def run(self, inputs: DeltaInputs, plan: DeltaPass) -> Tensor:
        """Runs the rule on the N new tokens of a pass; returns the outputs [N, H D_v].

        Stores the rows' new states, and the inputs of drafts in the window.
        """
        if plan.is_step:
            out, new_states = delta_step(inputs, self.states[plan.rows], self.heads)
            self.states[plan.rows] = new_states
        else:
            joined_inputs = []
            for stored, new in zip(self.window, inputs, strict=True):
                waiting = stored[plan.waiting_slots].to(new.dtype)
                joined_inputs.append(torch.cat((waiting, new)))
            states = self.states[plan.root_rows]
            out, end_states = delta_chunks(DeltaInputs(*joined_inputs), states, self.heads, plan.chunks)
            out = out[plan.waiting_count :]  # of the new tokens
            for row, stretch in plan.end_stretches.items():
                self.states[row] = end_states[stretch]
        if plan.drafts:
            self._store_drafts(inputs, plan)
        return out

    def _store_drafts(self, inputs: DeltaInputs, plan: DeltaPass) -> None:
        """Puts the inputs of drafts into the window, which grows if it has too few slots."""
        longest = max(part.count for part in plan.tokens)
        size = self.window.qkv.shape[1]
        if longest > size:
            larger_window = self._new_window(longest)
            for target, source in zip(larger_window, self.window, strict=True):
                target[:, :size] = source
            self.window = larger_window
        for stored, tensor in zip(self.window, inputs, strict=True):
            stored[plan.draft_slots] = tensor.to(stored.dtype)

    def _saved_tokens(self, parts: Sequence[RowPart]) -> list[tuple[int, int, int, int]]:
        """Returns no tokens: a `Ring` saves values so that a prefix can be copied, but here only whole rows can be."""
        return []

    def reserve(self, capacity: int, rows: int) -> None:
        """Does nothing: a state takes no more memory for more tokens."""

    def copyable(self, count: int, length: int, prefilled: int) -> int:
        """Returns `count` if it is the whole row, of `length` tokens; else 0, because a state cannot be rolled back."""
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
        assert count == length, "only a whole row can be copied"
        for tensor in (self.values, self.states, *self.window):
            tensor[target] = tensor[source]

    def swap(self, i: int, j: int, used: int) -> None:
        for tensor in (self.values, self.states, *self.window):
            exchange(tensor[i], tensor[j])

    def truncate(self, row: int, length: int, old_length: int) -> None:
        """Changes the state only if the row becomes empty: drafts are not in the state, see `DeltaPass`."""
        if length == 0:
            self.states[row] = 0

    def clear(self, row: int) -> None:
        self.values[row] = 0
        for tensor in self.window:
            tensor[row] = 0
        self.truncate(row, 0, old_length=0)
