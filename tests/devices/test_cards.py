"""The table of cards: names and figures."""

import pytest

from r3lite.devices import cards


@pytest.mark.parametrize(
    ("told", "known"),
    [
        ("NVIDIA GeForce RTX 3050 Laptop GPU", "RTX 3050 Laptop"),
        ("NVIDIA GeForce GTX 1650", "GTX 1650"),
        ("Tesla T4", "T4"),
        ("rtx 4060 laptop", "RTX 4060 Laptop"),
        ("NVIDIA GeForce RTX 4060", "RTX 4060"),
        ("NVIDIA GeForce RTX 3050", "RTX 3050"),  # another card than the laptop's
        ("NVIDIA GeForce GTX 1660 SUPER", "GTX 1660 Super"),
        ("laptop rtx3070 TI", "RTX 3070 Ti Laptop"),
        ("RTX 3090", None),
        ("3050", None),
        ("", None),
    ],
)
def test_a_card_is_found_by_the_name_that_its_driver_tells(told, known):
    assert getattr(cards.card(told), "name", None) == known


def test_the_table_is_of_cards_whose_figures_have_a_source():
    assert len({cards.name_words(known.name) for known in cards.CARDS}) == len(cards.CARDS)
    for known in cards.CARDS:
        assert known.source.startswith("https://") and known.memory and known.memory >= 2 * cards.GIB
        # From 64 GB/s and 2 TFLOPS on: a figure in another unit would be out of these bounds.
        assert all(6e10 <= bandwidth < 5e12 for bandwidth in known.bandwidth.values())
        assert known.flops.keys() == known.bandwidth.keys() <= set(cards.DTYPES)
        assert all(2e12 < flops < 1e15 for flops in known.flops.values())
        assert known.flops["fp16"] >= known.flops["fp32"]


def test_a_slip_is_of_a_card_with_the_same_number():
    assert cards.similar_names("RTX 3050 Laptp") == ["RTX 3050", "RTX 3050 Laptop", "RTX 3050 Ti Laptop"]
    assert cards.similar_names("RTX 3090") == cards.similar_names("a card") == []
