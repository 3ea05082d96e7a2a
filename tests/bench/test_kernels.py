"""bench.kernels: its arithmetic by hand, its split into layers on a small model, and how many kernels r3lite may take."""

import json
import sys
from pathlib import Path

import pytest
import torch

from bench import kernels, options
from bench.contest import OURS
from bench.kernels import PEFT, PREFILL, Row, decode_of, least_seconds, sft_of, small_folder
from bench.simulation.counts import Counts, Wait
from r3lite.devices.cards import Speeds
from r3lite.models.qwen2_config import read_config
from r3lite.models.weights import resolve_folder

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a real card is here: its tests are those marked gpu")

# The most of each, on the small model in fp32. Only ever to be lowered.
REACHES = {
    ("decode, 2 rows", "kernels a layer"): 49,
    ("decode, 2 rows", "kernels outside"): 60,
    ("decode, 2 rows", "waits"): 6,
    ("decode in NF4, 1 row", "kernels a layer"): 162,
    ("SFT of 64 tokens", "kernels a layer"): 151,
    ("SFT of 64 tokens", "kernels outside"): 282,
    ("SFT of 64 tokens", "waits"): 3,
}
TOKENS = 64


def figures(**known: int) -> dict[str, int]:
    return dict.fromkeys(kernels.FIGURES, 0) | known


def test_counts_become_figures():
    counts = Counts(3, 2, 10, 20, 70, uploads=1, downloads=4)
    counts.waits[Wait("a", ())] += 2
    expected = {"kernels": 3, "launches": 2, "moved": 30, "operations": 70, "copies": 5, "waits": 2}
    assert kernels.figures(counts) == expected


def test_what_a_layer_does_and_what_is_done_outside():
    """One layer 30, two layers 50: each has 20, and 10 are outside; 24 layers have 490."""
    row = Row.of("x", OURS, figures(kernels=30, moved=7), figures(kernels=50, moved=8))
    assert row.layer == figures(kernels=20, moved=1) and row.outside == figures(kernels=10, moved=6)
    assert row.whole(24) == figures(kernels=490, moved=30)


def test_the_least_time_on_a_card():
    card = Speeds("x", 100e9, {"fp32": 1e12, "fp16": 2e12}, 5e-6, "by hand")
    assert least_seconds(figures(moved=10**9), card, "fp32") == pytest.approx(0.01)
    assert least_seconds(figures(moved=10**9, operations=10**11), card, "fp32") == pytest.approx(0.1)
    assert least_seconds(figures(operations=10**11, launches=1000), card, "bf16") == pytest.approx(0.05 + 0.005)


def test_passes_over_the_logits_by_hand():
    """V = 1,000, 512 tokens: logits of 2,048,000 bytes. Eight times as many move, the head's 4 chunks twice included."""
    config = read_config(resolve_folder("tiny"))
    head = 2 * 4 * 1000 * config.hidden_size * 4
    row = Row(sft_of(512), OURS, figures(), figures(moved=8 * 2_048_000))
    record = row.record("x", config, 1000, 4)
    assert record["logit_passes"] == 8 and record["passes_without_head"] == round(8 - head / 2_048_000, 1)
    peer = Row(sft_of(512), PEFT, figures(), figures(moved=8 * 2_048_000)).record("x", config, 1000, 4)
    assert peer["passes_without_head"] == round(8 - head / 4 / 2_048_000, 1)  # all rows at once


@pytest.fixture
def small(folder, tmp_path, monkeypatch):
    """Counts of a contestant's work on the small model, for each of so many layers."""
    monkeypatch.setattr("bench.full_length.ORDINARY", (300, 1024))
    monkeypatch.setattr(kernels, "BATCHES", (1, 2))
    monkeypatch.setattr(kernels, "ROWS", (TOKENS,))

    def count(contestant: str, kinds: tuple[str, ...], layers: tuple[int, ...] = (1, 2)) -> list[Row]:
        folders = [small_folder(Path(folder), n, tmp_path) for n in layers]
        return kernels.measure(folders, "fp32", contestant, kinds, new=8)

    return count


def test_a_third_layer_does_what_the_second_does(small):
    by_two = {row.work: row for row in small(OURS, ("decode", "sft", "nf4"))}
    by_three = {row.work: row for row in small(OURS, ("decode", "sft", "nf4"), (3, 4))}
    works = [PREFILL, decode_of(1), decode_of(2), sft_of(TOKENS), decode_of(1, nf4=True)]
    assert [*by_two] == [*by_three] == works
    for work in works:
        two, three = by_two[work], by_three[work]
        # What `Row.of` takes for a model of one layer has three here.
        assert three.layer == two.layer and three.outside == figures(**two.whole(2))
        assert two.layer["moved"] > 0 and two.layer["operations"] > 0
    assert by_two[decode_of(2)].layer["launches"] == 0 < by_two[decode_of(2)].outside["launches"]  # a graph is one
    assert by_two[sft_of(TOKENS)].layer["launches"] == by_two[sft_of(TOKENS)].layer["kernels"]
    assert all(row.layer["waits"] == 0 for row in by_two.values())


def test_r3lite_takes_no_more_than_it_may(small):
    found = {}
    for row in small(OURS, ("decode", "sft", "nf4")):
        found[row.work, "kernels a layer"] = row.layer["kernels"]
        found[row.work, "kernels outside"] = row.outside["kernels"]
        found[row.work, "waits"] = row.outside["waits"]
    assert {key: found[key] for key, most in REACHES.items() if found[key] > most} == {}


def test_transformers_and_peft_are_counted_at_the_same_work(small):
    pytest.importorskip("peft")
    rows = {row.work: row for row in small(PEFT, ("decode", "sft", "nf4"))}
    assert [*rows] == [PREFILL, decode_of(1), decode_of(2), sft_of(TOKENS)]
    for row in rows.values():
        assert row.layer["kernels"] == row.layer["launches"] > 0 and row.layer["operations"] > 0
    ours = {row.work: row for row in small(OURS, ("sft",), (3, 4))}
    # The same products, but for those of the loss, which does not compute what a frozen head's gradient would need.
    assert ours[sft_of(TOKENS)].layer["operations"] == rows[sft_of(TOKENS)].layer["operations"]


def test_tables_and_json_are_written(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("bench.full_length.ORDINARY", (300, 1024))
    monkeypatch.setattr(kernels, "SIZES", ("model",))
    monkeypatch.setattr(kernels, "BATCHES", (1,))
    monkeypatch.setattr(kernels, "CONTESTANTS", {OURS: kernels.of_r3lite})
    monkeypatch.setattr(options, "HUB", {})
    arguments = ["--models", str(Path(folder).parent), "--only", "decode", "grpo", "--new", "4", "--results"]
    monkeypatch.setattr(sys, "argv", ["kernels", *arguments, str(tmp_path / "results")])
    kernels.main()
    runs = json.loads((tmp_path / "results" / "kernels.json").read_text(encoding="utf-8"))["runs"]
    counts, roofline = runs
    assert [r["work"] for r in counts["records"]] == [PREFILL, decode_of(1), "GRPO round of 8 x (216 + 4) tokens"]
    assert roofline["section"] == "roofline" and roofline["records"][0]["RTX 3050 Laptop, ms"] > 0
    told = (tmp_path / "results" / "kernels.md").read_text(encoding="utf-8")
    assert "Predicted, not measured." in told and "kernels a layer" in told and decode_of(1) in capsys.readouterr().out
