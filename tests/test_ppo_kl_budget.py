"""`ppo --kl-budget` on the tiny model: rates, an update that is taken back, resuming."""

import pytest
import torch

from r3lite import ppo
from r3lite.rl.learner import Learner
from r3lite.training import checkpoint
from tests.cold_start import SHORT, adapter, arguments, assert_same_runs, logged

# The first update is far too long, and is taken back in the second round.
FLAGS = f"{SHORT} --dtype fp32 --kl-beta 0 --kl-budget 0.001 --learning-rate 0.01 --max-steps 4 --keep-checkpoints 9"


def run(cold, output, *extra_flags: str) -> int:
    return ppo.main(arguments(cold, output, *FLAGS.split(), *extra_flags))


@pytest.fixture(scope="module")
def full_run(cold):
    """The run, and the rates of policy and critic in each round."""
    rates, learn = [], Learner.learn

    def noted(self, batch, seed):
        measured = learn(self, batch, seed)
        rates.append([group["lr"] for group in self.budget.optimizer.param_groups])
        return measured

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "learn", noted)
        assert run(cold, cold / "budget") == 0
    return cold / "budget", rates


def test_an_update_that_went_too_far_is_undone_and_the_next_are_shorter(full_run, cold):
    first, second, third, _ = logged(full_run[0], "metrics.jsonl")
    assert first["kl_budget/kl"] == first["kl_budget/allowed"] == 0 and first["kl_budget/scale"] == 1
    assert first["learning_rate"] == 0.01 and first["kl"] == pytest.approx(0, abs=1e-6)
    assert second["kl_budget/kl"] > 0.001 / 4 and second["kl_budget/taken_back"] == 1
    assert "loss" not in second and second["reward"] is not None
    assert second["kl_budget/scale"] <= 0.5 and second["learning_rate"] < 0.01 / 2
    assert third["kl_budget/kl"] == pytest.approx(0, abs=1e-6) and third["learning_rate"] < 0.01 / 4
    start, *round_adapters = (
        adapter(path) for path in (cold / "sft", *(full_run[0] / f"checkpoint-{n}" for n in (1, 2, 3)))
    )
    moved = [any(not torch.equal(x, later[name]) for name, x in start.items()) for later in round_adapters]
    assert moved == [True, False, True]
    assert checkpoint.read(full_run[0] / "checkpoint-2").tensors["optimizer"] == {}


def test_the_critic_keeps_the_scheduled_rate(full_run):
    """A line from the preset's rate to 0 over four rounds."""
    critic = [rates[1] for rates in full_run[1]]
    assert critic == pytest.approx([0.005, 0.00375, 0.0025, 0.00125])
    assert [rates[0] for rates in full_run[1]] == [r["learning_rate"] for r in logged(full_run[0], "metrics.jsonl")]


@pytest.mark.parametrize("stop", ["1", "2"])
def test_stopped_before_or_after_that_and_resumed_equals_uninterrupted(full_run, cold, tmp_path, stop):
    assert run(cold, tmp_path / "run", "--stop-after", stop) == 0
    assert run(cold, tmp_path / "run", "--resume", "auto") == 0
    assert_same_runs(full_run[0], tmp_path / "run")
    uninterrupted, resumed = (checkpoint.read(path / "checkpoint-4") for path in (full_run[0], tmp_path / "run"))
    assert uninterrupted.state["kept"] == resumed.state["kept"]
    budget, resumed_budget = (
        checkpoint.read(path / "checkpoint-3").tensors["kl_budget"] for path in (full_run[0], tmp_path / "run")
    )
    assert budget and all(torch.equal(x, resumed_budget[name]) for name, x in budget.items())
