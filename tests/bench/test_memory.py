"""bench.memory's cases on a small model: full lengths, and every figure that its table has."""

import argparse

import pytest
import torch

from bench import memory
from bench.memory import MINI_BATCH, PEFT_STORING, PROMPT, Case
from r3lite.devices.cards import MEASURED, Speeds
from r3lite.devices.precision import Precision
from r3lite.rl.learner import Learner

FP32 = Precision(torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("case", [Case("x", "sft", 64), Case("x", "grpo", 48)], ids=lambda case: case.algorithm)
def test_a_command_takes_what_was_planned_and_its_turns_are_full(folder, monkeypatch, case):
    batches = []
    learn = Learner.learn
    monkeypatch.setattr(Learner, "learn", lambda self, batch, seed: batches.append(batch) or learn(self, batch, seed))
    speeds = Speeds("x", {"fp32": 1e10}, {"fp32": 1e11}, 1e-6, MEASURED)
    monkeypatch.setattr(memory.speed, "measure", lambda device, product, dtypes: speeds)
    monkeypatch.setattr(memory, "round", lambda number, digits: number, raising=False)  # to a tenth: 5 % of the peak
    record = memory.measure(case, folder, FP32)
    off = 100 * (record["planned_mib"] - record["peak_mib"]) / record["peak_mib"]
    assert record["planned_off_percent"] == pytest.approx(off)
    assert record["planned_mib"] == pytest.approx(record["peak_mib"], rel=0.15)
    assert record["resident_mib"] > 100 > record["peak_mib"] and record["reserved_mib"] is None
    lengths = [row.sum().item() for batch in batches for row in batch.action_mask]
    assert lengths == ([48] * 16 if case.algorithm == "grpo" else [])  # once under the counter, once by the clock
    timed = ["step", "sample"] if case.algorithm == "grpo" else ["step"]
    for phase in timed:
        measured, predicted = record[f"{phase}_s"], record[f"predicted_{phase}_s"]
        assert 0 < measured < 60 and 0 < predicted < 60
        assert record[f"{phase}_off_percent"] == pytest.approx(100 * (predicted / measured - 1))
    assert [name for name in record if name.endswith("_s")] == [
        n for w in timed for n in (f"{w}_s", f"predicted_{w}_s")
    ]
    of_samples = {"sample_s", "predicted_sample_s", "sample_off_percent"}
    assert set(record) == set(memory.COLUMNS) - (set() if "sample" in timed else of_samples)


def test_algorithms_that_are_guided_have_their_trace_and_their_replay(folder):
    """A replay comes in the second round only, and a trace is as long as an episode, as the plan takes it to be."""
    _, record = memory.run_command(Case("x", "hybrid", 64), folder, FP32)
    assert record["step"] == 2 and record["off_policy/traces"] == record["off_policy/replays"] == 1
    # Two of ten episodes: no share of the tokens but theirs if all have equal lengths.
    assert record["off_policy/token_share"] == pytest.approx(2 / 10, abs=0.01)


@pytest.mark.parametrize("algorithm", ["peft", PEFT_STORING])
def test_peers_are_measured_without_a_plan(folder, monkeypatch, algorithm):
    pytest.importorskip("peft")
    monkeypatch.setattr("bench.full_length.ORDINARY", (300, 1024))
    record = memory.measure(Case("x", algorithm, 64), folder, FP32)
    assert record["peak_mib"] > 0 and record["planned_mib"] is None and record["planned_off_percent"] is None
    assert "step_s" not in record


def test_trl_has_the_batch_shape_of_r3lites_own_round(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(
        memory.peers, "grpo_trainer", lambda *shape, **options: calls.append((shape, options)) or Trainer()
    )
    memory.run_peer(Case("0.5B", "trl", 64), "folder", FP32)
    assert calls == [(("folder", PROMPT, 64, 8, MINI_BATCH, FP32), {"steps": 2})]
    flags = memory.arguments(Case("0.5B", "grpo", 64), "tiny", tmp_path, FP32)
    shape = {name: flags[flags.index(name) + 1] for name in ("--num-generations", "--mini-batch-size", "--batch-size")}
    assert shape == {"--num-generations": "8", "--mini-batch-size": str(MINI_BATCH), "--batch-size": "1"}


class Trainer:
    def train(self) -> None:
        pass


def test_cases_are_chosen_by_size_and_algorithm():
    flags = {"row": False, "only": ["0.5B"], "algorithms": ["trl", PEFT_STORING]}
    assert {(c.size, c.algorithm) for c in memory.selected_cases(argparse.Namespace(**flags))} == {
        ("0.5B", "trl"), ("0.5B", PEFT_STORING)
    }  # fmt: skip
    assert memory.selected_cases(argparse.Namespace(row=True)) == [Case("0.5B", "sft", 1024)]
