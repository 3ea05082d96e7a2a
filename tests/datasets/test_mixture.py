"""Draws of several sources: how often each, every row once a pass, and no memory that a resumed run would lack."""

from collections import Counter

import pytest

from r3lite.datasets.order import Mixture

SIZES, WEIGHTS = (5, 7, 2), (3.0, 1.0, 2.0)


def source_of(row: int) -> int:
    return 0 if row < 5 else 1 if row < 12 else 2


def test_sources_are_drawn_by_their_share_of_the_weights():
    drawn = Counter(map(source_of, Mixture(SIZES, WEIGHTS, "0").rows(0, 30_000)))
    for source, share in enumerate((1 / 2, 1 / 6, 1 / 3)):
        deviation = (30_000 * share * (1 - share)) ** 0.5
        assert abs(drawn[source] - 30_000 * share) < 4 * deviation
    doubled = Mixture(SIZES, [2 * weight for weight in WEIGHTS], "0")  # only their ratios count
    assert doubled.rows(0, 100) == Mixture(SIZES, WEIGHTS, "0").rows(0, 100)


def test_each_pass_over_a_source_has_every_row_once_in_an_order_of_its_own():
    drawn = Mixture(SIZES, WEIGHTS, "0").rows(0, 400)
    for source, rows in enumerate((range(5), range(5, 12), range(12, 14))):
        source_rows = [row for row in drawn if source_of(row) == source]
        passes = [source_rows[i : i + len(rows)] for i in range(0, len(source_rows) - len(rows) + 1, len(rows))]
        assert len(passes) > 5 and all(sorted(order) == list(rows) for order in passes)
        assert len({tuple(order) for order in passes}) > 1


def test_a_later_draw_needs_none_before_it_and_the_seed_decides():
    uninterrupted = Mixture(SIZES, WEIGHTS, "0").rows(0, 300)
    resumed = Mixture(SIZES, WEIGHTS, "0")
    assert resumed.rows(250, 300) == uninterrupted[250:] and resumed.rows(10, 20) == uninterrupted[10:20]
    assert Mixture(SIZES, WEIGHTS, "1").rows(0, 300) != uninterrupted


def test_a_shuffle_of_all_rows_puts_a_source_first_by_its_share():
    mixture = Mixture(SIZES, WEIGHTS, "0")
    orders = [mixture.shuffled(f"stream {i}") for i in range(3000)]
    assert all(sorted(order) == list(range(14)) for order in orders[:20])
    assert mixture.shuffled("stream 7") == orders[7] != orders[8]
    first = Counter(order[0] for order in orders)
    for row in range(14):  # a row's chance is its source's, shared by the source's rows
        chance = WEIGHTS[source_of(row)] / 6 / SIZES[source_of(row)]
        assert first[row] / 3000 == pytest.approx(chance, abs=4 * (chance * (1 - chance) / 3000) ** 0.5)
