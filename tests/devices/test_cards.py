"""The table of cards, and what `doctor` measured: names, figures, and files that are not what they should be."""

import json

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
        assert 6e10 <= known.bandwidth < 1e12 and known.flops.keys() <= set(cards.DTYPES)
        assert all(2e12 < flops < 1e14 for flops in known.flops.values())
        assert known.flops["fp16"] >= known.flops["fp32"]


@pytest.fixture
def doctor(tmp_path, monkeypatch):
    """Writes what `doctor` has measured, with changes; None removes a key."""
    path = tmp_path / "doctor.json"
    monkeypatch.setattr(cards, "DOCTOR", str(path))
    good = {
        "name": cards.device_name(CPU),
        "bandwidth": 1.5e10,
        "flops": {"fp32": 1e11, "bf16": 4e11, "fp16": None},
        "launch": 2e-6,
        "source": "measured",
        "memory": None,
        "reads": {"fp32": 1.5e10, "bf16": 9e9},
    }

    def write(**changes) -> None:
        speeds = {key: value for key, value in (good | changes).items() if value is not None}
        path.write_text(json.dumps({"ok": True, "speeds": speeds}), encoding="utf-8")

    return write


def test_what_was_measured_is_read_for_the_device_that_it_was_measured_on(doctor, monkeypatch, capsys):
    assert cards.measured(CPU) is None  # not measured yet
    doctor()
    found = cards.measured(CPU)
    assert found == cards.Speeds(
        cards.device_name(CPU), 1.5e10, {"fp32": 1e11, "bf16": 4e11}, 2e-6, cards.MEASURED, None,
        {"fp32": 1.5e10, "bf16": 9e9},
    )  # fmt: skip
    assert cards.speeds_of(CPU) == found
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    assert cards.measured(CPU) is None, "of another number of threads"
    assert capsys.readouterr().err == ""


def test_a_card_that_was_measured_is_not_looked_up_and_another_is(doctor, monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GeForce RTX 3050 Laptop GPU")
    doctor(name="NVIDIA GeForce RTX 3050 Laptop GPU")
    assert cards.speeds_of(cuda).bandwidth == 1.5e10
    doctor(name="NVIDIA GeForce GTX 1650")
    assert cards.speeds_of(cuda) == cards.card("RTX 3050 Laptop")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GeForce RTX 9990")
    assert cards.speeds_of(cuda) is None


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"bandwidth": 0}, "speeds.bandwidth is 0"),
        ({"bandwidth": "fast"}, "speeds.bandwidth is 'fast'"),
        ({"flops": [1]}, "speeds.flops is [1], not a JSON object"),
        ({"flops": {"fp32": -1}}, "speeds.flops.fp32 is -1"),
        ({"reads": {"bf16": 0}}, "speeds.reads.bf16 is 0"),
        ({"launch": None}, "speeds.launch is missing"),
        ({"name": ""}, "speeds.name is blank"),
        ({"source": "guessed"}, "speeds.source is 'guessed'"),
    ],
)
def test_a_file_that_is_wrong_is_one_line_of_warning_and_no_failure(doctor, capsys, changes, wrong):
    doctor(**changes)
    assert cards.measured(CPU) is None
    told = capsys.readouterr().err
    assert told.startswith("warning: ") and wrong in told and told.count("\n") == 1
    assert told.endswith("Run python -m r3lite.doctor again.\n")


def test_a_file_that_is_not_json_or_a_folder_is_one_too(tmp_path, monkeypatch, capsys):
    (tmp_path / "torn.json").write_text('{"speeds": {"na')
    for place in (tmp_path / "torn.json", tmp_path):
        monkeypatch.setattr(cards, "DOCTOR", str(place))
        assert cards.measured(CPU) is None
        assert capsys.readouterr().err.count("\n") == 1
