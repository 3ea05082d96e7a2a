"""What layers carry in the cache: of short convolutions the last values, exact through drafts, copies and exchanges."""

import os
import sys

import pytest
import torch

from bench.serving import resident
from r3lite.devices.live_tensors import MIB
from r3lite.models.carried import SAVED_EVERY, SPARE, KeysValues, Ring
from r3lite.models.kv_cache import BLOCK, KVCache, Prefill
from r3lite.models.verification import Verification
from r3lite.settings.rollout import MOST_DRAFTED
from tests.lfm2_models import switches

LENGTH = 3 * SAVED_EVERY + 30


@pytest.fixture
def model(small_model):
    return small_model(**switches(3))


@pytest.fixture
def rows() -> list[list[int]]:
    """Two rows that begin alike."""
    ids = torch.randint(300, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    ids[1, : 2 * SAVED_EVERY + 9] = ids[0, : 2 * SAVED_EVERY + 9]
    return ids.tolist()


def read(model, cache, row: int, tokens: list[int]) -> torch.Tensor:
    prefill = Prefill(cache, [(row, tokens)])
    return model(prefill.tokens, prefill)[0]


@torch.no_grad()
def states(model, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens]))[0]


@torch.no_grad()
@pytest.mark.parametrize("draft", [1, 7, MOST_DRAFTED])
def test_drafts_that_are_rejected_leave_no_trace(model, rows, draft):
    """Rows confirm other shares of their drafts, pass after pass, at the beginning of a row and beyond the ring."""
    cache = KVCache.of(model, 2)
    expected = [states(model, row) for row in rows]
    lengths = [1, 90]
    for row, length in enumerate(lengths):
        read(model, cache, row, rows[row][:length])
    for turn in range(6):
        wrong = [299 - turn] * draft
        right = [turn % (draft + 1), (turn + 1) % 2]  # tokens of the draft that are confirmed
        additions = []
        for row, length in enumerate(lengths):
            end = length + 1 + right[row]
            additions.append(rows[row][length:end] + wrong[right[row] :])
        verification = Verification(cache, additions)
        hidden = model(verification.tokens, verification)[0].split([1 + draft] * 2)
        for row, length in enumerate(lengths):
            end = length + 1 + right[row]
            torch.testing.assert_close(hidden[row][: end - length], expected[row][length:end], rtol=1e-4, atol=1e-5)
            cache.truncate(row, end)
            lengths[row] = end
    for row, length in enumerate(lengths):
        next_hidden = read(model, cache, row, rows[row][length : length + 9])
        torch.testing.assert_close(next_hidden, expected[row][length : length + 9], rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("decoded", [0, SPARE, SPARE + 1])
@pytest.mark.parametrize("wanted", [2 * SAVED_EVERY + 9, SAVED_EVERY, 1, 0])
def test_a_row_goes_on_from_a_copied_prefix(model, rows, decoded, wanted):
    """A prompt that is shared by a group is copied as it is, soon after it was read, and later from what was saved."""
    shared = 2 * SAVED_EVERY + 9
    cache = KVCache.of(model, 2)
    read(model, cache, 1, rows[1][::-1])  # of another sequence before
    read(model, cache, 0, rows[0][:shared])
    for token in rows[0][shared : shared + decoded]:
        cache.swap(0, 1)
        cache.swap(1, 0)
        model(torch.tensor([[token]]), cache.decode(1))
    count = cache.copyable(0, wanted)
    is_near = shared + decoded - wanted <= SPARE
    assert count == (wanted if is_near else wanted // SAVED_EVERY * SAVED_EVERY)
    cache.copy(0, 1, count)
    assert cache.lengths == [shared + decoded, count]
    hidden = read(model, cache, 1, rows[1][count:])
    torch.testing.assert_close(hidden, states(model, rows[1])[count:], rtol=1e-4, atol=1e-5)
    assert cache.prefilled == [shared, LENGTH]
    assert cache.copyable(1, LENGTH - SPARE - 1) == 3 * SAVED_EVERY


@torch.no_grad()
def test_what_was_decoded_is_not_copied_later(model, rows):
    """Only prefills save values: those of a prefix that ends in decoded tokens are not there."""
    cache = KVCache.of(model, 1)
    read(model, cache, 0, rows[0][: SAVED_EVERY + 5])
    for token in rows[0][SAVED_EVERY + 5 : 2 * SAVED_EVERY + 5]:
        model(torch.tensor([[token]]), cache.decode(1))
    read(model, cache, 0, rows[0][2 * SAVED_EVERY + 5 : LENGTH])
    assert cache.copyable(0, 3 * SAVED_EVERY) == SAVED_EVERY
    cache.truncate(0, 0)
    assert cache.copyable(0, 0) == 0 and cache.prefilled == [0]


@torch.no_grad()
def test_a_prefix_is_copied_onto_its_own_row(model, rows):
    """The row of the last sequence, when all are free, has the prompt of the next one."""
    cache = KVCache.of(model, 1)
    read(model, cache, 0, rows[0])
    cache.copy(0, 0, cache.copyable(0, 2 * SAVED_EVERY + 9))
    assert cache.lengths == [2 * SAVED_EVERY]
    hidden = read(model, cache, 0, rows[1][2 * SAVED_EVERY :])
    torch.testing.assert_close(hidden, states(model, rows[1])[2 * SAVED_EVERY :], rtol=1e-4, atol=1e-5)


def test_keys_and_values_of_any_prefix_can_be_copied(small_model):
    cache = KVCache.of(small_model(), 1)
    assert all(isinstance(layer, KeysValues) for layer in cache.layers)
    read(small_model(), cache, 0, list(range(50)))
    assert cache.copyable(0, 17) == 17


def test_a_growing_cache_keeps_the_rows_with_tokens(small_model):
    cache = KVCache.of(small_model(), 3)
    read(small_model(), cache, 1, list(range(50)))
    before = [layer.block.clone() for layer in cache.layers]
    cache.layers[0].block[2] = float("nan")  # behind the last row with tokens: nothing of it may be left
    cache.reserve(3 * BLOCK)
    for layer, block in zip(cache.layers, before):
        assert layer.block.shape[2] == 3 * BLOCK
        assert torch.equal(layer.block[:2, :, :BLOCK], block[:2]) and block[1].any()
        assert not layer.block[2].any() and not layer.block[:, :, BLOCK:].any()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_rows_without_tokens_take_no_memory(small_model):
    """All rows were written whenever the cache grew, also those that no sequence used."""
    cache = KVCache.of(small_model(), 1024)
    before = resident(os.getpid())
    cache.reserve(16 * BLOCK)
    size = sum(layer.block.nbytes for layer in cache.layers) / MIB
    assert size > 256
    assert resident(os.getpid()) - before < size / 8


def test_a_ring_does_not_grow_with_its_row(model):
    cache = KVCache.of(model, 2)
    ring = cache.layers[0]
    size = ring.values.nbytes
    cache.reserve(4 * BLOCK)
    assert isinstance(ring, Ring) and ring.values.nbytes == size
    assert ring.saved.shape == (2, 4 * BLOCK // SAVED_EVERY, 2, 64)


@torch.no_grad()
def test_a_cleared_row_has_nothing_of_what_was_no_number(model, rows):
    cache = KVCache.of(model, 1)
    read(model, cache, 0, rows[0])
    for layer in (cache.layers[0], cache.layers[2]):
        layer.values[:] = float("nan")
        layer.saved[:] = float("nan")
    cache.clear(0)
    hidden = read(model, cache, 0, rows[0][:20])
    torch.testing.assert_close(hidden, states(model, rows[0][:20]), rtol=1e-4, atol=1e-5)
