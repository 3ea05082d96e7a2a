"""The checks of whole runs: sound code passes them, and each fails if what it looks at is broken."""

import contextlib
import functools
import itertools
import math

import pytest
import torch

from r3lite.assembly import supervised
from r3lite.checks import runs
from r3lite.checks.sample import CPU
from r3lite.core import command
from r3lite.core.errors import R3LiteError
from r3lite.devices.precision import Precision
from r3lite.memory.plan import Plan
from r3lite.training import state
from tests.errors import raises

EXACT, HALF = Precision(torch.float32, CPU), Precision(torch.float16, CPU)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Fewer steps, and shorter rows."""
    monkeypatch.setattr(runs, "STEPS", 2)
    monkeypatch.setattr(runs, "TOKENS", {False: 1000, True: 1000})


def failed(finding) -> bool:
    return finding.state == "failed" and bool(finding.message) and bool(finding.remedy)


def test_training_in_bf16_is_close_to_fp32_and_fp32_is_what_it_is_compared_with():
    assert runs.training(Precision(torch.bfloat16, CPU)).state == "ok"
    assert runs.training(EXACT).state == "skipped"


def test_training_in_fp16_is_close_to_fp32():
    assert runs.training_in_fp16(EXACT).state == "ok"
    assert runs.training_in_fp16(HALF).state == "skipped"  # `training` is in fp16 then


def test_training_fails_that_learns_otherwise(monkeypatch):
    step = Precision.step

    def still(self, optimizer, parameters, max_norm):
        """In bf16 nothing is learned."""
        if self.dtype == torch.bfloat16:
            optimizer.zero_grad()
            return 1.0, False
        return step(self, optimizer, parameters, max_norm)

    monkeypatch.setattr(Precision, "step", still)
    monkeypatch.setattr(runs, "STEPS", 3)
    assert failed(runs.training(Precision(torch.bfloat16, CPU)))


@pytest.mark.parametrize("wrong", [1, 2])
def test_training_fails_if_the_loss_of_a_step_is_no_number(monkeypatch, wrong):
    step = supervised.SFTTrainer.step

    def lost(self, number):
        record, tokens = step(self, number)
        is_wrong = self.policy.precision.dtype == torch.bfloat16 and number == wrong
        return record | ({"loss": float("nan")} if is_wrong else {}), tokens

    monkeypatch.setattr(supervised.SFTTrainer, "step", lost)
    assert failed(runs.training(Precision(torch.bfloat16, CPU)))


@pytest.mark.usefixtures("fast_half_products")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_takes_what_was_planned(dtype):
    finding = runs.memory(Precision(dtype, CPU))
    assert finding.state == "ok" and 0 < finding.measured["measured_mib"] <= finding.measured["budget_mib"]


@pytest.mark.parametrize("share", [0.8, 1.2])
def test_memory_fails_that_was_planned_wrongly(monkeypatch, share):
    planned = Plan.allocated.fget
    monkeypatch.setattr(Plan, "allocated", property(lambda self: int(share * planned(self))))
    assert failed(runs.memory(EXACT))


def test_what_earlier_checks_left_on_a_card_is_dropped_before_measuring(monkeypatch):
    done = []
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, functools.partial(done.append, name))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 50 << 20)
    clear = functools.partial(done.append, "workspaces")
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)
    assert runs._freed_card() == 50 << 20
    assert done == ["workspaces", "empty_cache", "reset_peak_memory_stats"]


def test_what_stays_there_is_granted_and_not_planned_with(monkeypatch):
    """The plan used that room for the run itself, and memory ran out: 1,030 MiB were planned for 1,071 in all."""
    enforced, stays, run = [], 50 << 20, runs._run
    monkeypatch.setattr(runs, "enforce", lambda plan, device: enforced.append(plan.budget))
    monkeypatch.setattr(runs, "_freed_card", lambda: stays)
    monkeypatch.setattr(runs, "_run", lambda flags, **options: run(["--preset", "tiny", *flags[4:]], **options))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 0)
    monkeypatch.setattr(runs, "whole_card", contextlib.nullcontext)
    finding = runs.memory(Precision(torch.float32, torch.device("cuda")))
    assert enforced[1] == finding.measured["budget_mib"] * (1 << 20) + stays


def test_memory_fails_if_it_runs_out(monkeypatch):
    work, calls = supervised.SFTTrainer.add_gradients, itertools.count()

    def runs_out(self, rows):
        if next(calls) == 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return work(self, rows)

    monkeypatch.setattr(supervised.SFTTrainer, "add_gradients", runs_out)
    finding = runs.memory(EXACT)
    assert failed(finding) and "out of memory" in finding.message


def test_a_resumed_run_is_equal_to_the_bit():
    assert runs.resume(EXACT).state == "ok"


def test_resume_fails_that_forgets_the_random_stream(monkeypatch):
    """Dropout then draws other numbers than it would have."""
    monkeypatch.setattr(state, "set_random_state", lambda states: None)
    assert failed(runs.resume(EXACT))


def test_resume_fails_that_forgets_the_moments(monkeypatch):
    monkeypatch.setattr(state.optim, "load_state_tensors", lambda optimizer, tensors: None)
    assert failed(runs.resume(EXACT))


def test_where_equal_runs_differ_nothing_can_be_equal_to_the_bit(monkeypatch):
    noise, step = itertools.count(), supervised.SFTTrainer.step

    def noisy(self, number):
        record, tokens = step(self, number)
        return record | {"loss": record["loss"] + 1e-7 * next(noise)}, tokens

    monkeypatch.setattr(supervised.SFTTrainer, "step", noisy)
    finding = runs.resume(EXACT)
    assert finding.state == "skipped" and "does not repeat runs exactly" in finding.message


def test_losses_that_are_no_numbers_are_no_error_of_the_check_itself():
    """A file of metrics has null for such a loss, from which nothing can be subtracted."""
    sound, lost = [{"loss": 1.0}, {"loss": 2.0}], [{"loss": 1.0}, {"loss": None}]
    assert runs._largest_difference(sound, [{"loss": 1.0}, {"loss": 2.5}]) == 0.5
    assert math.isnan(runs._largest_difference(sound, lost))


def test_a_run_that_fails_is_an_error_and_one_that_is_stopped_stops(monkeypatch, tmp_path):
    monkeypatch.setattr(command.Command, "__call__", lambda *_: 1)
    with raises(R3LiteError, "command-failed", "1"):
        runs.train(tmp_path, [])
    monkeypatch.setattr(command.Command, "__call__", lambda *_: 130)
    with pytest.raises(KeyboardInterrupt):
        runs.train(tmp_path, [])
