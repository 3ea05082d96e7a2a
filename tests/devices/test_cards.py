"""The table of cards, and what is kept of devices that were measured: names, figures, and files that are wrong."""

from dataclasses import replace

import pytest
import torch

from r3lite.devices import cards

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("told", "known"),
    [
        ("NVIDIA GeForce RTX 3050 Laptop GPU", "RTX 3050 Laptop"),
        ("NVIDIA GeForce GTX 1650", "GTX 1650"),
        ("Tesla T4", "T4"),
        ("rtx 4060 laptop", "RTX 4060 Laptop"),
        ("NVIDIA GeForce RTX 4060", "RTX 4060"),
        ("NVIDIA GeForce RTX 3050", None),  # another card than the laptop's
        ("NVIDIA GeForce GTX 1650 Ti", None),
        ("", None),
    ],
)
def test_a_card_is_found_by_the_name_that_its_driver_tells(told, known):
    assert getattr(cards.card(told), "name", None) == known


def test_the_table_is_of_cards_whose_figures_have_a_source():
    assert len({known.name for known in cards.CARDS}) == len(cards.CARDS)
    for known in cards.CARDS:
        assert known.source.startswith("https://") and known.memory and known.memory >= 2 * cards.GIB
        # From 64 GB/s and 2 TFLOPS on: a figure in another unit would be out of these bounds.
        assert 6e10 <= known.bandwidth < 5e12 and known.flops.keys() <= set(cards.DTYPES)
        assert all(2e12 < flops < 1e15 for flops in known.flops.values())
        assert known.flops["fp16"] >= known.flops["fp32"]


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The file of what was measured, in a folder that is not there yet."""
    monkeypatch.setattr(cards, "KEPT", str(tmp_path / "cache" / "speeds.json"))
    return tmp_path / "cache" / "speeds.json"


FLOPS, READS = {"fp32": 1e11, "bf16": 4e11}, {"fp32": 1.5e10, "bf16": 9e9}


def speeds(**changes) -> cards.Speeds:
    made = cards.Speeds(cards.device_name(CPU), 1.5e10, FLOPS, 2e-6, cards.MEASURED, None, READS)
    return replace(made, **changes)


def test_what_was_measured_is_kept_for_each_device_and_version_of_pytorch(kept, monkeypatch):
    assert cards.measured(CPU) is None
    assert cards.keep(speeds()) == "" and cards.measured(CPU) == speeds()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 99)
        assert cards.measured(CPU) is None, "of another number of threads"
        cards.keep(speeds(name=cards.device_name(CPU), launch=1.0))
        assert cards.measured(CPU).launch == 1.0
    with monkeypatch.context() as patch:
        patch.setattr(cards, "processor", lambda: "an abacus")
        assert cards.measured(CPU) is None, "of another processor, which may have the same home"
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "3.0")
        assert cards.measured(CPU) is None
    assert cards.measured(CPU) == speeds(), "what came later is beside it"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GeForce GTX 1650")
    assert cards.measured(torch.device("cuda")) is None
    cards.keep(speeds(name="NVIDIA GeForce GTX 1650", memory=4 << 30))
    assert cards.measured(torch.device("cuda")).memory == 4 << 30


@pytest.mark.parametrize(
    "changes",
    [
        {"bandwidth": 0},
        {"bandwidth": "fast"},
        {"flops": [1]},
        {"flops": {"fp32": -1}},
        {"reads": {"bf16": 0}},
        {"launch": None},
        {"name": ""},
        {"source": "guessed"},
    ],
)
def test_a_record_that_is_wrong_was_not_measured_and_is_replaced(kept, changes):
    cards.keep(speeds(**changes))
    assert cards.measured(CPU) is None
    assert cards.keep(speeds()) == "" and cards.measured(CPU) == speeds()


def test_a_file_that_is_torn_is_replaced_and_one_that_cannot_be_is_told_of(kept):
    kept.parent.mkdir()
    kept.write_text('{"speeds": {"na')
    assert cards.measured(CPU) is None
    assert cards.keep(speeds()) == "" and cards.measured(CPU) == speeds()
    kept.unlink()
    kept.mkdir()
    assert cards.measured(CPU) is None
    assert str(kept) in cards.keep(speeds())
