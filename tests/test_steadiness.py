"""Steadiness of SFT: the largest pass is rehearsed in the first step without a trace, and memory does not drift."""

import pytest
import torch

from r3lite import sft
from r3lite.assembly import supervised
from r3lite.devices.live_tensors import MIB, LiveTensors
from r3lite.training import checkpoint, metrics
from tests.test_sft import toy  # noqa: F401 (a fixture)

KINDS = {
    "lora": ["--lora-dropout", "0.1", "--gradient-accumulation", "2"],
    "lora fp16": ["--gradient-accumulation", "2", "--dtype", "fp16"],
    "full": ["--no-lora", "--dtype", "bf16"],
}


@pytest.fixture
def rehearsing(monkeypatch):
    """Has the trainer rehearse on a CPU, too; returns the sizes in tokens of all passes with gradients, in order."""
    passes, step, loss = [], supervised.SFTTrainer.step, supervised.SFTTrainer.loss

    def with_rehearsal(trainer, number):
        if not trainer.rehearsed:
            trainer.policy.model.train()
            shortest = sorted(trainer.rows, key=lambda row: len(row.tokens))[:1]
            trainer.rehearse(shortest)
        return step(trainer, number)

    def counted(trainer, rows):
        passes.append(sum(len(row.tokens) for row in rows))
        return loss(trainer, rows)

    monkeypatch.setattr(supervised.SFTTrainer, "step", with_rehearsal)
    monkeypatch.setattr(supervised.SFTTrainer, "loss", counted)
    return passes


@pytest.mark.parametrize("kind", KINDS)
def test_a_rehearsal_leaves_nothing_but_what_it_found_out(toy, tmp_path, kind, request):  # noqa: F811
    arguments = [*toy, *KINDS[kind], "--batch-size", "2", "--max-steps", "4", "--validation-rows", "0"]
    assert sft.main([*arguments, "--output", str(tmp_path / "plain")]) == 0
    passes = request.getfixturevalue("rehearsing")
    assert sft.main([*arguments, "--output", str(tmp_path / "rehearsed")]) == 0
    assert passes[0] == max(passes)
    one, two = (metrics.read(tmp_path / name / metrics.FILE) for name in ("plain", "rehearsed"))
    assert [metrics.repeatable(r) for r in one] == [metrics.repeatable(r) for r in two]
    one, two = (checkpoint.read(tmp_path / name / "checkpoint-4").tensors for name in ("plain", "rehearsed"))
    assert all(torch.equal(one[group][name], two[group][name]) for group in one for name in one[group])


def test_rows_that_do_not_fit_make_passes_smaller_in_the_first_step(toy, tmp_path, rehearsing, monkeypatch, capsys):  # noqa: F811
    loss = supervised.SFTTrainer.loss

    def short_of_memory(trainer, rows):
        if trainer.policy.grant.memory.micro_batch_tokens == 8192:
            raise torch.OutOfMemoryError("out of memory")
        return loss(trainer, rows)

    monkeypatch.setattr(supervised.SFTTrainer, "loss", short_of_memory)
    arguments = [*toy, "--batch-size", "2", "--max-steps", "1", "--validation-rows", "0"]
    assert sft.main([*arguments, "--output", str(tmp_path / "run")]) == 0
    assert "out of memory; the step is repeated with micro_batch_tokens" in capsys.readouterr().err
    assert checkpoint.read(tmp_path / "run" / "checkpoint-1").state["kept"]["memory"]["micro_batch_tokens"] < 8192


@pytest.mark.parametrize("steps", [40, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_live_bytes_do_not_drift_over_steps_of_changing_lengths(toy, tmp_path, monkeypatch, kind, steps):  # noqa: F811
    counter, live, step = LiveTensors(), [], supervised.SFTTrainer.step
    monkeypatch.setattr(
        supervised.SFTTrainer, "step", lambda self, number: (step(self, number), live.append(counter.live))[0]
    )
    arguments = [*toy, *KINDS[kind], "--batch-size", "1", "--max-steps", str(steps), "--validation-rows", "0"]
    with counter:
        assert sft.main([*arguments, "--save-every", "0", "--output", str(tmp_path / "run")]) == 0
    assert len(live) == steps
    assert abs(live[-1] - live[4]) <= MIB
