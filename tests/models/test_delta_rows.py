"""Rows of a cache whose layers carry states: drafts are taken back, prefixes copied and rows exchanged, all exactly."""

import pytest
import torch

from r3lite.models.causal_lm import LayerKind
from r3lite.models.gated_delta import DeltaHeads
from r3lite.models.gemma import ZeroCentredRMSNorm
from r3lite.models.kv_cache import KVCache, Prefill
from r3lite.models.qwen3_5 import Qwen35Layer
from r3lite.models.rotary import Rope
from r3lite.models.verification import Verification

DELTA = LayerKind(rope=None, taps=4, delta=DeltaHeads(key_heads=2, value_heads=4, key_dim=8, value_dim=16))
FULL = LayerKind(Rope(10_000.0, dims=4))
LIKE_QWEN35 = {"qkv_bias": False, "qk_norm": True, "layer": Qwen35Layer, "norm": ZeroCentredRMSNorm,
               "layer_kinds": (DELTA, FULL, DELTA)}  # fmt: skip


@pytest.fixture
def model(small_model):
    return small_model(**LIKE_QWEN35)


class Rows:
    """Rows of tokens in a cache, each of whose passes is compared with the model without a cache."""

    def __init__(self, model, rows: int):
        self.model = model
        self.cache = KVCache.of(model, rows)
        self.ids = torch.randint(300, (rows, 400), generator=torch.Generator().manual_seed(3)).tolist()
        self.tokens: list[list[int]] = [[] for _ in range(rows)]  # of each row, in the cache

    def next(self, row: int, count: int) -> list[int]:
        length = len(self.tokens[row])
        return self.ids[row][length : length + count]

    @torch.no_grad()
    def check(self, row: int, hidden: torch.Tensor, new: list[int]) -> None:
        self.tokens[row] += new
        expected = self.model(torch.tensor([self.tokens[row]]))[0, -len(new) :]
        assert (
            hidden - expected
        ).abs().max() < 1e-3  # hidden states are of size 4; a state that is wrong differs by .1
        assert self.cache.lengths[row] == len(self.tokens[row])

    @torch.no_grad()
    def prefill(self, counts: dict[int, int]) -> None:
        parts = [(row, self.next(row, count)) for row, count in counts.items()]
        prefill = Prefill(self.cache, parts)
        hidden = self.model(prefill.tokens, prefill)[0].split(list(counts.values()))
        for (row, new), states in zip(parts, hidden, strict=True):
            self.check(row, states, new)

    @torch.no_grad()
    def decode(self, count: int) -> None:
        """One more token in each of the first rows."""
        new = [self.next(row, 1) for row in range(count)]
        hidden = self.model(torch.tensor(new), self.cache.decode(count))
        for row in range(count):
            self.check(row, hidden[row], new[row])

    @torch.no_grad()
    def draft(self, accepted: list[int], drafted: list[int]) -> None:
        """Rows get one token and drafts, of which `accepted` are what comes next."""
        additions = []
        for row, (right, count) in enumerate(zip(accepted, drafted, strict=True)):
            wrong = [299 - token for token in self.next(row, 1 + count)[1 + right :]]
            additions.append(self.next(row, 1 + right) + wrong)
        context = Verification(self.cache, additions)
        hidden = self.model(context.tokens, context)[0].split([len(tokens) for tokens in additions])
        for row, right in enumerate(accepted):
            self.cache.truncate(row, len(self.tokens[row]) + 1 + right)
            self.check(row, hidden[row][: 1 + right], additions[row][: 1 + right])


def test_drafts_that_are_taken_back_leave_no_trace(model):
    rows = Rows(model, 3)
    rows.prefill({0: 70, 1: 5, 2: 131})
    rows.draft(accepted=[2, 0, 5], drafted=[3, 4, 5])
    rows.draft(accepted=[0, 7, 1], drafted=[2, 7, 9])  # a wider window, while all rows have tokens in the one before
    rows.decode(2)  # the third waits, with tokens in its window
    rows.draft(accepted=[1, 0], drafted=[1, 20])
    rows.decode(3)
    rows.decode(3)
    rows.draft(accepted=[3, 3, 0], drafted=[6, 3, 2])
    rows.prefill({1: 100, 2: 3})  # documents
    rows.decode(3)


def test_a_pass_that_is_taken_back_as_a_whole_leaves_no_trace(model):
    """As when it is not finite: what it read of the window it has applied."""
    rows = Rows(model, 2)
    rows.prefill({0: 20, 1: 9})
    rows.draft(accepted=[2, 1], drafted=[4, 4])
    lengths = list(rows.cache.lengths)
    with torch.no_grad():
        context = Verification(rows.cache, [[1, 2, 3], [4, 5]])
        model(context.tokens, context)
    for row, length in enumerate(lengths):
        rows.cache.truncate(row, length)
        rows.cache.wipe(row)
    rows.decode(2)
    rows.draft(accepted=[1, 1], drafted=[2, 2])
    rows.decode(2)


def test_rows_that_are_exchanged_keep_their_states(model):
    rows = Rows(model, 3)
    rows.prefill({0: 30, 1: 12, 2: 70})
    rows.draft(accepted=[1, 2, 0], drafted=[3, 3, 3])
    rows.cache.swap(0, 2)
    for of_rows in (rows.tokens, rows.ids):
        of_rows[0], of_rows[2] = of_rows[2], of_rows[0]
    rows.decode(2)
    rows.prefill({2: 40})
    rows.decode(3)


def test_a_row_is_copied_as_a_whole_or_not_at_all(model):
    """Also with the drafts that wait in its window, of which the copy may take back others."""
    rows = Rows(model, 4)
    assert rows.cache.copyable(0, 50, prefilled=50) == 50 and rows.cache.copyable(0, 49, prefilled=50) == 0
    rows.prefill({0: 30})
    rows.draft(accepted=[2], drafted=[4])
    assert [rows.cache.copyable(0, count) for count in (30, 32, 33)] == [0, 0, 33]
    with torch.no_grad():
        context = Verification(rows.cache, [rows.next(0, 3)])
        model(context.tokens, context)
    for target in (1, 2):
        rows.cache.copy(target - 1, target, 36)  # the second is a copy of the copy
        rows.ids[target] = rows.ids[0]
        rows.tokens[target] = list(rows.ids[0])
    for row, length in enumerate((34, 36, 35)):
        rows.tokens[row] = rows.ids[row][:length]
        rows.cache.truncate(row, length)
    rows.decode(3)
    rows.draft(accepted=[1, 0, 3], drafted=[3, 3, 3])
    rows.cache.copy(0, 1, rows.cache.copyable(0, 7))  # nothing
    rows.tokens[1] = []
    rows.prefill({1: 60})
    rows.decode(3)


def test_a_cleared_row_has_nothing_of_a_number_that_is_not_finite(model):
    rows = Rows(model, 2)
    rows.prefill({0: 5, 1: 5})
    rows.draft(accepted=[2, 2], drafted=[3, 3])
    for layer in (0, 2):
        carried = rows.cache.layers[layer]
        for tensor in (carried.states, carried.values, *carried.window):
            tensor[1] = float("nan")
    rows.cache.clear(1)
    rows.tokens[1] = []
    rows.prefill({1: 20})
    rows.decode(2)
    rows.draft(accepted=[0, 2], drafted=[3, 3])
    rows.decode(2)
