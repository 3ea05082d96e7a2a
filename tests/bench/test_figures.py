"""The arithmetic of the benches, with numbers worked by hand, and what stays in their files."""

import json
from types import SimpleNamespace

import pytest
import torch

from bench import limits, profile, records
from bench.contests import FLOOR, OURS, PEAK, Contest
from bench.limits import training_flops
from bench.parts import FROZEN, HEAD, REST
from bench.scaling import Growth, exponent


def test_exponents_of_power_laws():
    assert exponent([128, 512, 2048], [3, 3, 3]) == pytest.approx(0)
    assert exponent([2, 4, 8], [10, 20, 40]) == pytest.approx(1)
    assert exponent([2, 4, 8], [1, 4, 16]) == pytest.approx(2)
    # log2: (1, 0), (2, 1), (3, 1): slope ((-1)(-2/3) + 0 + (1)(1/3)) / 2 = 1/2
    assert exponent([2, 4, 8], [1, 2, 2]) == pytest.approx(0.5)


def test_growth_is_one_record_of_medians():
    growth = Growth("x", 0, {}, seconds={"1": [1.0, 3.0, 2.0], "10": [20.0, 20.0, 20.0]})
    (found,) = growth.results()
    assert found["sizes"] == [1, 10] and found["seconds"] == [2, 20]
    assert found["exponent"] == 1 and found["largest_spread"] == 1


def test_operations_of_a_training_step():
    # 10 tokens: 4 x (100 + 50) of the base and the head and 6 x 5 of the adapters each, 6 x 2 x 3 x 10^2 of attention
    assert training_flops(base=100, head=50, adapters=5, layers=2, width=3, tokens=10) == 6000 + 300 + 3600


def test_contestants_are_held_against_the_limits_that_took_part():
    contest = Contest("x", 100, {}, seconds={OURS: [4.0], "peer": [8.0], FLOOR: [2.0], PEAK: [1.0]})
    ours, peer, *_ = contest.results()
    assert (ours["of_peak"], ours["of_floor"]) == (0.25, 0.5)
    assert (peer["of_peak"], peer["of_floor"], peer["r3lite_is_faster_by"]) == (0.125, 0.25, 2.0)
    assert "of_peak" not in Contest("x", 100, {}, seconds={OURS: [4.0]}).results()[0]


def test_the_peak_makes_whole_products_and_counts_the_operations_that_were_asked_for(monkeypatch):
    clock = iter([10.0, 13.0])
    monkeypatch.setattr(limits, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    two_and_a_half = 5 * 2048**3  # a product of 2,048 x 2,048 matrices takes 2 x 2048^3
    with torch.profiler.profile() as profiled:
        assert limits.products(two_and_a_half, "cpu")() == pytest.approx(2.5)  # of the three products' 3 s
    assert sum(e.name == "aten::mm" for e in profiled.events()) == 3


def test_sections_that_were_not_run_stay_on_the_same_machine_only(tmp_path):
    stem = tmp_path / "speed"
    records.keep(stem, "Speed", "this", "decode", "5 repeats.", [{"contest": "a", "tokens_per_second": 1}])
    records.keep(stem, "Speed", "this", "scaling", "5 repeats.", [{"sizes": [1, 2], "exponent": 1.0}])
    records.keep(stem, "Speed", "this", "decode", "2 repeats.", [{"contest": "a", "tokens_per_second": 2}])
    sections = json.loads(stem.with_suffix(".json").read_text())["sections"]
    assert list(sections) == ["decode", "scaling"] and sections["decode"]["records"][0]["tokens_per_second"] == 2
    text = stem.with_suffix(".md").read_text()
    assert "| contest | tokens/s |\n|---|---|\n| a | 2 |" in text and "| 1 / 2 | 1.0 |" in text
    records.keep(stem, "Speed", "another", "sft", "5 repeats.", [])
    assert list(json.loads(stem.with_suffix(".json").read_text())["sections"]) == ["sft"]


def test_a_profile_in_words_and_in_a_table():
    found = {FROZEN: 1.5, HEAD: 0.06, REST: 0.44}
    said = profile.summary("A step", found, {"rollout": 1.5, "update": 0.5})
    assert said.startswith("A step takes 2.00 s: 75 % multiplies by the model's frozen weights") and "; 22 % " in said
    assert "probabilities" not in said and said.endswith("By stage: 75 % rollout, 25 % update.")
    # operators 1.56 s of 2.4 s: Python has at most 35 %
    bounds = profile.reliability(found, profiled=2.4)
    assert bounds == "Under the profiler it took 2.40 s: Python and overhead is between 22 % and 35 %."
    assert profile.rows(found)[1] == {"part": HEAD, "percent": 3.0, "milliseconds": 60.0}
