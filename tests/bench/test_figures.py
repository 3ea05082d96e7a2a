"""The arithmetic of the benches, with numbers worked by hand; and the figures in the documents are those measured."""

from types import SimpleNamespace

import pytest
import torch

from bench import limits, profile
from bench.contest import FLOOR, OURS, PEAK, Contest
from bench.limits import training_flops
from bench.parts import FROZEN, HEAD, OVERHEAD
from bench.scaling import Growth, exponent
from r3lite.devices.precision import Precision
from tests.bench import claims


def test_exponents_of_power_laws():
    assert exponent([128, 512, 2048], [3, 3, 3]) == pytest.approx(0)
    assert exponent([2, 4, 8], [10, 20, 40]) == pytest.approx(1)
    assert exponent([2, 4, 8], [1, 4, 16]) == pytest.approx(2)
    # log2: (1, 0), (2, 1), (3, 1): slope ((-1)(-2/3) + 0 + (1)(1/3)) / 2 = 1/2
    assert exponent([2, 4, 8], [1, 2, 2]) == pytest.approx(0.5)


def test_growth_is_one_record_of_medians():
    growth = Growth("x", 0, {}, seconds={"1": [1.0, 3.0, 2.0], "10": [20.0, 20.0, 20.0]})
    (record,) = growth.results()
    assert record["sizes"] == [1, 10] and record["seconds"] == [2, 20]
    assert record["exponent"] == 1 and record["largest_spread"] == 1


def test_operations_of_a_training_step():
    # 10 tokens: 4 x (100 + 50) of the base and the head and 6 x 5 of the adapters each, 6 x 2 x 3 x 10^2 of attention
    assert training_flops(base=100, head=50, adapters=5, layers=2, width=3, tokens=10) == 6000 + 300 + 3600


def test_contestants_are_held_against_the_limits_that_took_part():
    contest = Contest("x", 100, {}, seconds={OURS: [4.0], "peer": [8.0], FLOOR: [2.0], PEAK: [1.0]})
    ours, peer, *_ = contest.results()
    assert (ours["of_peak"], ours["of_floor"]) == (0.25, 0.5)
    assert (peer["of_peak"], peer["of_floor"], peer["r3lite_is_faster_by"]) == (0.125, 0.25, 2.0)
    assert "of_peak" not in Contest("x", 100, {}, seconds={OURS: [4.0]}).results()[0]


def test_the_fastest_rival_within_the_budget_is_the_one_compared():
    seconds = {OURS: [4.0], "with": [8.0], "without": [5.0], "slow": [9.0], PEAK: [1.0]}
    peaks = {OURS: 90.0, "with": 100.0, "without": 101.0, "slow": 50.0}
    ours, *rivals = Contest("x", 100, {}, budget=100, seconds=seconds, peaks=peaks).results()
    assert ours["compared_with"] == "with" and ours["budget_mib"] == 100 and ours["peak_mib"] == 90.0
    by = {record["contestant"]: record["r3lite_is_faster_by"] for record in rivals}
    assert by == {"with": 2.0, "without": 1.25, "slow": 2.25, PEAK: 0.25}  # the figures of all
    roomy = Contest("x", 100, {}, budget=101, seconds=seconds, peaks=peaks).results()
    assert roomy[0]["compared_with"] == "without"
    tight = Contest("x", 100, {}, budget=10, seconds=seconds, peaks=peaks).results()
    assert tight[0]["compared_with"] == "none that fits"


def test_a_contest_with_a_budget_measures_the_peaks_of_its_contestants():
    def allocate() -> None:
        torch.zeros(1 << 20)  # 4 MiB

    contest = Contest("x", 1, {OURS: allocate, "peer": lambda: torch.zeros(1 << 18), PEAK: allocate}, budget=2)
    contest.run(1, "cpu")
    assert contest.peaks == {OURS: 4.0, "peer": 1.0}
    assert contest.results()[0]["compared_with"] == "peer"


def test_facts_of_a_contest_are_in_every_record():
    facts = {"corpus": "world/corpus.jsonl", "mean_tokens": 46.8}
    contest = Contest("x", 100, {}, facts=facts, seconds={OURS: [4.0], "peer": [8.0]})
    assert all(facts.items() <= record.items() for record in contest.results())


def test_the_peak_makes_whole_products_and_counts_the_operations_that_were_asked_for(monkeypatch):
    clock = iter([10.0, 13.0])
    monkeypatch.setattr(limits, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    in_fp32 = Precision(torch.float32, torch.device("cpu"))
    two_and_a_half = 5 * 2048**3  # a product of 2,048 x 2,048 matrices takes 2 x 2048^3
    met = []
    monkeypatch.setattr(limits, "linear", lambda *matrices: met.append([m.shape for m in matrices]))
    assert limits.products(two_and_a_half, in_fp32)() == pytest.approx(2.5)  # of the three products' 3 s
    assert met == [[(2048, 2048), (2048, 2048)]] * 3


def test_a_profile_in_words_and_in_a_table():
    part_seconds = {FROZEN: 1.5, HEAD: 0.06, OVERHEAD: 0.44}
    summary = profile.summary("A step", part_seconds, {"rollout": 1.5, "update": 0.5})
    assert (
        summary.startswith("A step takes 2.00 s: 75 % multiplies by the model's frozen weights")
        and "; 22 % " in summary
    )
    assert "probabilities" not in summary and summary.endswith("By stage: 75 % rollout, 25 % update.")
    # operators 1.56 s of 2.4 s: Python has at most 35 %
    bounds = profile.reliability(part_seconds, profiled_seconds=2.4)
    assert bounds == "Under the profiler it took 2.40 s: Python and overhead is between 22 % and 35 %."
    assert profile.rows(part_seconds)[1] == {"part": HEAD, "percent": 3.0, "milliseconds": 60.0}


def test_every_figure_of_a_bench_in_the_documents_is_of_a_committed_run():
    assert len(list(claims.rows_of(documents()))) >= 20
    assert claims.without_result(documents()) == []


def documents() -> str:
    """README and, if it exists, the page of figures: a figure may be in either."""
    paths = [claims.ROOT / "README.md", claims.ROOT / "docs" / "figures.md"]
    return "\n\n".join(path.read_text(encoding="utf-8") for path in paths if path.exists())


def test_a_figure_that_was_not_measured_is_found():
    """Of the committed runs: decoding at batch 8 was 54.4 against 34.7 tokens/s, 1.57 times as fast, in one of them."""
    head = "| what | r3lite | the other | times faster |\n|---|---|---|---|\n"
    right = "| a | 54.4 tokens/s | 34.7 | 1.57 |"
    assert claims.without_result(head + right) == []
    for wrong in ("| a | 54.5 tokens/s | 34.7 | 1.57 |", "| a | 54.4 tokens/s | 34.8 | 1.57 |"):
        assert claims.without_result(head + wrong) == ["a"]
    assert claims.without_result(head + "| a | 54.4 tokens/s | 45.7 | 1.57 |") == ["a"]  # of two runs
    assert claims.without_result("| what | figure |\n|---|---|\n| b | 1,257 / 1,306 MiB |") == []
    assert claims.without_result("| what | figure |\n|---|---|\n| b | 1,257 / 1,309 MiB |") == ["b"]
    assert claims.without_result("came out between 1.42 and 1.57 in four runs") == []
    assert claims.without_result("between 1.42 and 1.55 in four runs") == ["between 1.42 and 1.55 in four runs"]
    assert claims.without_result("between 1.42 and 1.57 in three") == ["between 1.42 and 1.57 in three"]
