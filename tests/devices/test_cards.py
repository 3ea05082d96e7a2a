"""The table of cards: names and figures."""

import pytest

from r3lite.devices import cards


@pytest.mark.parametrize(
    ("driver_name", "table_name"),
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
def test_a_card_is_found_by_the_name_that_its_driver_tells(driver_name, table_name):
    assert getattr(cards.card(driver_name), "name", None) == table_name


def test_the_table_is_of_cards_whose_figures_have_a_source():
    assert len({cards.name_words(card.name) for card in cards.CARDS}) == len(cards.CARDS)
    for card in cards.CARDS:
        assert card.source.startswith("https://") and card.memory and card.memory >= 2 * cards.GIB
        # From 64 GB/s and 2 TFLOPS on: a figure in another unit would be out of these bounds.
        assert all(6e10 <= bandwidth < 5e12 for bandwidth in card.bandwidth.values())
        assert card.flops.keys() == card.bandwidth.keys() <= set(cards.DTYPES)
        assert all(2e12 < flops < 1e15 for flops in card.flops.values())
        assert card.flops["fp16"] >= card.flops["fp32"]


def test_a_slip_is_of_a_card_with_the_same_number():
    assert cards.similar_names("RTX 3050 Laptp") == ["RTX 3050", "RTX 3050 Laptop", "RTX 3050 Ti Laptop"]
    assert cards.similar_names("RTX 3090") == cards.similar_names("a card") == []
