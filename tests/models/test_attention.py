"""The attention contexts: a row's states are the same by itself, in a pack, and given to a cache piece by piece."""

import inspect

import pytest
import torch

from r3lite.models.attention import AttentionContext, CausalRows
from r3lite.models.kv_cache import BLOCK, Decode, KVCache, Prefill
from r3lite.models.packing import GRANULE, Pack

LENGTHS = (BLOCK + 9, 3 * GRANULE, 2 * GRANULE + 1)
SHARED = 2 * GRANULE  # tokens that all rows begin with


@pytest.fixture
def model(small_model):
    return small_model()


@pytest.fixture
def rows() -> list[list[int]]:
    ids = torch.randint(300, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(0))
    ids[:, :SHARED] = ids[0, :SHARED]
    return [row[:length].tolist() for row, length in zip(ids, LENGTHS)]


def by_themselves(model, rows) -> list[torch.Tensor]:
    states = []
    for row in rows:
        ids = torch.tensor([row])
        states.append(model(ids, CausalRows(ids))[0])
    return states


def in_a_pack(model, rows) -> list[torch.Tensor]:
    pack = Pack.of(rows, torch.device("cpu"))
    assert pack.tokens.shape[1] < sum(map(len, rows))
    hidden = model(pack.tokens, pack)[0]
    return [hidden[places] for places in pack.places]


def in_a_cache(model, rows) -> list[torch.Tensor]:
    """The first half of each row in one prefill, three tokens one by one, the rest in another prefill."""
    cache = KVCache.of(model, len(LENGTHS))
    pieces = [[] for _ in rows]

    def prefill(parts: list[list[int]]) -> None:
        additions = [(i, part) for i, part in enumerate(parts) if part]
        context = Prefill(cache, additions)
        hidden = model(context.tokens, context)[0].split([len(part) for _, part in additions])
        for (i, _), states in zip(additions, hidden):
            pieces[i].append(states)

    prefill([row[: len(row) // 2] for row in rows])
    for step in range(3):
        context = cache.decode(len(rows))
        hidden = model(torch.tensor([[row[len(row) // 2 + step]] for row in rows]), context)
        for states, row_pieces in zip(hidden, pieces):
            row_pieces.append(states)
    prefill([row[len(row) // 2 + 3 :] for row in rows])
    assert cache.lengths == list(LENGTHS)
    return [torch.cat(states) for states in pieces]


@torch.no_grad()
@pytest.mark.parametrize("way", [by_themselves, in_a_pack, in_a_cache])
def test_states_are_the_same_in_every_context(model, rows, way):
    padded = torch.zeros(len(rows), max(LENGTHS), dtype=torch.long)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(row)
    expected = model(padded)
    for states, row, actual in zip(expected, rows, way(model, rows), strict=True):
        torch.testing.assert_close(actual, states[: len(row)], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [CausalRows, Pack, Prefill, Decode])
def test_all_contexts_have_the_interface(kind):
    assert inspect.signature(kind.attend) == inspect.signature(AttentionContext.attend)
    assert inspect.signature(kind.convolve) == inspect.signature(AttentionContext.convolve)
