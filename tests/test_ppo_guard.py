"""Validation and rollback on the tiny checkpoint: numbers that do not change, a forced collapse, exact resuming."""

import json

import pytest
import torch

from r3lite import ppo
from r3lite.training import checkpoint
from tests.cold_start import WORLD, adapter, arguments, logged, same

EVAL = ["--eval-data", str(WORLD / "test.jsonl"), "--eval-questions", "12", "--eval-every", "2"]
# One hop, and 32 episodes a round, so that the first round alone is what later ones are compared with.
WIDE = "--batch-size 4 --num-generations 8 --mini-batch-size 16 --max-hops 1 --max-new-tokens 48 --kl-beta 0.01"
COLLAPSE = f"{WIDE} --learning-rate 0.05 --warmup 0 --guard-patience 1 --guard-malformed 0.2".split()


def own_numbers(record: dict) -> dict:
    """The metrics of the training itself: no speeds, nothing of validation and guard."""
    left_out = ("time/", "eval/", "guard/")
    measured = ("step_time", "tokens_per_second", "peak_memory_mib")
    return {k: v for k, v in record.items() if k not in measured and not k.startswith(left_out)}


def test_the_numbers_of_training_are_the_same_with_and_without_validation(cold, tmp_path):
    short = ["--max-steps", "2", "--num-generations", "2"]
    assert ppo.main(arguments(cold, tmp_path / "with", *short, *EVAL)) == 0
    assert ppo.main(arguments(cold, tmp_path / "without", *short)) == 0
    one, other = (logged(tmp_path / name, "metrics.jsonl") for name in ("with", "without"))
    assert [r["step"] for r in one] == [0, 1, 2] and [r["step"] for r in other] == [1, 2]
    assert [own_numbers(r) for r in one[1:]] == [own_numbers(r) for r in other]
    keys = {"eval/em", "eval/f1", "eval/format_adherence", "eval/retrieval_recall", "eval/searches"}
    assert all(keys <= one[i].keys() for i in (0, 2)) and not keys & one[1].keys()
    held = [checkpoint.read(tmp_path / name / "checkpoint-2").tensors for name in ("with", "without")]
    for group in checkpoint.GROUPS:
        assert all(torch.equal(t, held[1][group][k]) for k, t in held[0][group].items())


@pytest.fixture(scope="module")
def collapsed(cold):
    """A run that breaks its model in the first round, and is let go on with a rate that does not."""
    run = cold / "collapsed"
    assert ppo.main(arguments(cold, run, *EVAL, *COLLAPSE, "--guard-rate-factor", "1e-5")) == 0
    return run


def test_a_forced_collapse_is_rolled_back_and_ends_with_the_best_adapter(collapsed, cold):
    records = {r["step"]: r for r in logged(collapsed, "metrics.jsonl")}
    assert records[2]["guard/alarm"] == "guard_malformed" and records[2]["malformed_ratio"] > 0.8
    assert records[4]["guard/rollbacks"] == 1 and records[4]["malformed_ratio"] < records[2]["malformed_ratio"] - 0.2
    assert records[3]["learning_rate"] < 1e-5 * records[2]["learning_rate"] * 1.01
    best = max(r["eval/f1"] for r in records.values() if "eval/f1" in r)
    summary = json.loads((collapsed / "summary.json").read_text(encoding="utf-8"))
    assert records[summary["adapter_step"]]["eval/f1"] == best >= records[0]["eval/f1"]
    assert records[4]["eval/f1"] >= best - 0.02
    kept, final = (adapter(collapsed / name) for name in (f"checkpoint-{summary['adapter_step']}", "."))
    assert all(torch.equal(t, final[k]) for k, t in kept.items())


def test_stopped_after_a_rollback_and_resumed_equals_uninterrupted(collapsed, cold, tmp_path):
    run = arguments(cold, tmp_path / "run", *EVAL, *COLLAPSE, "--guard-rate-factor", "1e-5")
    assert ppo.main([*run, "--stop-after", "2"]) == 0
    start, now = (checkpoint.read(tmp_path / "run" / f"checkpoint-{n}").tensors["weights"] for n in (0, 2))
    assert all(torch.equal(t, now[k]) for k, t in start.items())  # it was rolled back
    assert ppo.main([*run, "--resume", "auto"]) == 0
    same(collapsed, tmp_path / "run")
