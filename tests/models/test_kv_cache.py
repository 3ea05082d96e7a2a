"""A step of decoding: its operations on a CPU, and its hidden states whatever these are."""

import pytest
import torch

from r3lite.models.causal_lm import LayerKind, Rope
from r3lite.models.kv_cache import ROW_COST, KVCache, Prefill


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(
    ("starts", "row_by_row"),
    [
        ([300, 290, 240], False),
        ([300, 300, 2], False),
        ([2 * ROW_COST, 1], False),
        ([2 * ROW_COST + 2, 1], True),
        ([700, 3, 30], True),
        ([9], False),
    ],
    ids=str,
)
def test_rows_read_their_own_slots_alone_where_many_are_empty(small_model, starts, row_by_row, window):
    """An operation for each row took a tenth of the time of sampling 32 short episodes of equal lengths."""
    rope = Rope(10_000.0)
    model = small_model(layer_kinds=(LayerKind(rope, window=window), LayerKind(rope), LayerKind(rope, window=window)))
    cache = KVCache.of(model, len(starts))
    tokens_of_rows = [[(7 * i + row) % 300 for i in range(start)] for row, start in enumerate(starts)]
    prefill = Prefill(cache, list(enumerate(tokens_of_rows)))
    model(prefill.tokens, prefill)
    context = cache.decode(len(starts))
    assert bool(context.lengths) == row_by_row
    hidden = model(torch.full((len(starts), 1), 5), context)[:, 0]
    for row, tokens in enumerate(tokens_of_rows):
        uncached = model(torch.tensor([[*tokens, 5]]))[0, -1]
        assert torch.allclose(hidden[row], uncached, atol=2e-4)
