"""Packs: hidden states and gradients are those of the rows by themselves, and what rows share is read once."""

import random
from itertools import pairwise

import pytest
import torch

from r3lite.core.grant import Grant, Memory
from r3lite.models import activation_checkpointing, lora
from r3lite.models.packing import GRANULE, Pack, pack_rows, states_at
from tests.lfm2_models import switches


def tokens(seed: int, count: int) -> list[int]:
    stream = random.Random(seed)
    return [stream.randrange(300) for _ in range(count)]


SYSTEM, QUESTION, STEPS = tokens(0, 2 * GRANULE), tokens(1, GRANULE + 5), tokens(2, 3 * GRANULE)
# One question's rollouts, two of which begin with the same step, one of which ends there; another question with the
# same instructions; one row twice; a row with nothing in common; one of a single token.
ROWS = [
    SYSTEM + QUESTION + tokens(3, 9),
    SYSTEM + QUESTION + STEPS + tokens(4, 11),
    SYSTEM + QUESTION + STEPS,
    SYSTEM + QUESTION + STEPS + tokens(5, 20),
    SYSTEM + tokens(6, 30),
    SYSTEM + tokens(6, 30),
    tokens(7, 25),
    [5],
]
CHOSEN = [[random.Random(len(row)).random() < 0.5 or t == len(row) - 1 for t in range(len(row))] for row in ROWS]


@pytest.fixture(params=["attention", "convolutions"])
def model(small_model, request):
    changes = switches(3) if request.param == "convolutions" else {}
    model = small_model(**changes).train()
    lora.add_adapter(model, "policy", r=4, alpha=8)
    generator = torch.Generator().manual_seed(1)
    for key, p in lora.adapter_parameters(model, "policy").items():
        if "lora_B" in key:
            p.data.normal_(0, 0.05, generator=generator)
    lora.set_adapter(model, "policy")
    return model


def pack(rows) -> Pack:
    return Pack.of(rows, torch.device("cpu"))


def test_every_row_has_its_tokens_at_their_positions():
    packed = pack(ROWS)
    for row, places in zip(ROWS, packed.places, strict=True):
        assert packed.tokens[0, places].tolist() == row
        assert packed.positions[0, places].tolist() == list(range(len(row)))


def test_what_rows_share_is_there_once():
    of_rows = [len(row) for row in ROWS]
    both = (len(SYSTEM + QUESTION) // GRANULE) * GRANULE
    repeated_row = len(ROWS[4]) // GRANULE * GRANULE
    with_steps = len(ROWS[2]) // GRANULE * GRANULE
    # In sorted order each row adds what it does not share with one before it.
    expected = sum(of_rows) - 2 * with_steps - both - len(SYSTEM) - repeated_row
    assert pack(ROWS).tokens.shape == (1, expected)
    assert pack([ROWS[6], ROWS[7]]).tokens.shape == (1, len(ROWS[6]) + 1)


@pytest.mark.parametrize("recomputed", [None, 1, 2])
def test_states_and_gradients_are_those_of_the_rows_by_themselves(model, recomputed):
    parameters = list(lora.adapter_parameters(model, "policy").values())
    weights = [torch.rand(len(row), 64, generator=torch.Generator().manual_seed(i)) for i, row in enumerate(ROWS)]
    alone = [model(torch.tensor([row]))[0] for row in ROWS]
    loss = sum((states * weight)[:-1].sum() for states, weight in zip(alone, weights))
    expected = torch.autograd.grad(loss, parameters)
    if recomputed is not None:
        activation_checkpointing.enable(model, Grant(Memory(recompute_layers=recomputed, mlp_tile=50)))
    packed = pack(ROWS)
    hidden = model(packed.tokens, packed)[0]
    together = [hidden[places] for places in packed.places]
    for states, row_states in zip(together, alone, strict=True):
        torch.testing.assert_close(states, row_states, rtol=1e-4, atol=1e-5)
    sum((states * weight)[:-1].sum() for states, weight in zip(together, weights)).backward()
    for p, grad in zip(parameters, expected):
        assert grad.norm() > 0
        torch.testing.assert_close(p.grad, grad, rtol=1e-3, atol=1e-5 * float(grad.abs().max()) + 1e-6)


def test_predicted_tokens_come_in_the_order_of_the_rows():
    packed = pack(ROWS)
    states, ids = packed.predicted(CHOSEN)
    expected = [(i, t) for i, row in enumerate(ROWS) for t in range(1, len(row)) if CHOSEN[i][t]]
    assert ids.tolist() == [ROWS[i][t] for i, t in expected]
    assert states.tolist() == [packed.places[i][t - 1] for i, t in expected]


def test_nothing_is_predicted_without_a_choice():
    states, ids = pack(ROWS).predicted([[False] * len(row) for row in ROWS])
    assert states.shape == ids.shape == (0,) and states.dtype == ids.dtype == torch.long


def test_states_and_their_gradients_are_those_of_indexing():
    hidden = torch.randn(1, 9, 5, dtype=torch.float64, requires_grad=True)
    places = torch.tensor([3, 0, 3, 8, 3])
    assert torch.equal(states_at(hidden, places), hidden[0, places])
    weight = torch.randn(5, 5, dtype=torch.float64)
    grad, expected_grad = (
        torch.autograd.grad((states * weight).sum(), hidden)[0]
        for states in (states_at(hidden, places), hidden[0, places])
    )
    torch.testing.assert_close(grad, expected_grad)


def test_gradients_of_states_are_the_same_to_the_bit_however_threads_run():
    threads = torch.get_num_threads()
    hidden = torch.randn(1, 400, 256, requires_grad=True)
    places = torch.randint(400, (400,))
    weight = torch.randn(400, 256)
    torch.set_num_threads(4)  # more than most machines of tests have to itself
    try:
        grads = [torch.autograd.grad(states_at(hidden, places), hidden, weight)[0] for _ in range(100)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(grad, grads[0]) for grad in grads)


@pytest.mark.parametrize("max_rows", [1, 3, 8])
@pytest.mark.parametrize("limit", [40, 100, 10_000])
def test_groups_fill_their_packs_up_to_the_limit(limit, max_rows):
    groups = pack_rows(ROWS, limit, max_rows)
    assert sorted(i for group in groups for i in group) == list(range(len(ROWS)))
    for group in groups:
        assert len(group) <= max_rows
        assert len(group) == 1 or pack([ROWS[i] for i in group]).tokens.shape[1] <= limit
    # Nothing is left that the group before had room for.
    for group, (first, *_) in pairwise(groups):
        assert len(group) == max_rows or pack([ROWS[i] for i in [*group, first]]).tokens.shape[1] > limit


def test_no_rows_make_no_groups():
    assert pack_rows([], 100, 8) == []
