"""Steadiness: the largest pass is rehearsed before the first step without a trace, and memory does not drift."""

import pytest
import torch

from r3lite import ppo, sft
from r3lite.assembly import reinforcement, supervised
from r3lite.assembly.teacher import TeacherInTurns
from r3lite.core import run_files
from r3lite.core.invocation import resolve
from r3lite.datasets.sources import read_data
from r3lite.devices.live_tensors import MIB, LiveTensors
from r3lite.rl.learner import Learner
from r3lite.rollout.engine import Engine
from r3lite.settings import SftConfig
from r3lite.training import checkpoint, loop, metrics
from tests.cold_start import arguments as rl_flags
from tests.cold_start import assert_same_runs, logged
from tests.memory.test_shrinking import FIXED, failing, paid, run_rl  # noqa: F401 (a fixture)
from tests.memory.test_shrinking import toy as toy_of_rl  # noqa: F401 (a fixture)
from tests.test_sft import toy  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("fast_half_products")
KINDS = {
    "lora": ["--lora-dropout", "0.1", "--gradient-accumulation", "2"],
    "lora fp16": ["--gradient-accumulation", "2", "--dtype", "fp16"],
    "full": ["--no-lora", "--dtype", "bf16"],
}


@pytest.fixture
def rehearsing(monkeypatch):
    """Has trainers rehearse on a CPU, too; returns the sizes in tokens of all passes with gradients, in order."""
    passes, loss, loss_in_rl = [], supervised.SFTTrainer.loss, Learner.loss

    def counted(trainer, rows):
        passes.append(sum(len(row.tokens) for row in rows))
        return loss(trainer, rows)

    def counted_in_rl(learner, batch):
        passes.append(sum(map(len, batch.token_rows())))
        return loss_in_rl(learner, batch)

    monkeypatch.setattr(loop, "REHEARSED", ("cpu",))
    monkeypatch.setattr(supervised.SFTTrainer, "loss", counted)
    monkeypatch.setattr(Learner, "loss", counted_in_rl)
    return passes


@pytest.mark.parametrize("kind", KINDS)
def test_a_rehearsal_leaves_nothing_but_what_it_found_out(toy, tmp_path, kind, request):  # noqa: F811
    arguments = [*toy, *KINDS[kind], "--batch-size", "2", "--max-steps", "4", "--validation-rows", "0"]
    assert sft.main([*arguments, "--output", str(tmp_path / "plain")]) == 0
    passes = request.getfixturevalue("rehearsing")
    assert sft.main([*arguments, "--output", str(tmp_path / "rehearsed")]) == 0
    assert passes[0] == max(passes)
    one, two = (metrics.read(tmp_path / name / run_files.METRICS) for name in ("plain", "rehearsed"))
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


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_rehearsal_takes_the_room_of_the_moments_that_are_not_there_yet(toy, kind):  # noqa: F811
    """Without them it would find room that the second step does not have."""
    config = resolve("sft", SftConfig(), [*toy, *KINDS[kind], "--batch-size", "1"])
    trainer = supervised.build_trainer(config, *read_data(config))
    taken = []
    for number in (1, 2):
        with LiveTensors() as counter, trainer.policy.grant.rehearsal():
            taken.append(counter.live)
        trainer.step(number)
    moments = [x for state in trainer.state.optimizer.state.values() for x in state.values()]
    assert taken[0] == pytest.approx(sum(-(-x.nbytes // 512) * 512 for x in moments), rel=0.02)
    assert taken[1] < 512 * 64


ALGORITHMS = {
    "ppo": ["--kl-target", "0.01"],
    "grpo": ["--dtype", "fp16"],
    "gspo": ["--update-epochs", "2"],
    "dgpo": ["--teacher", "tiny", "--nf4-cache", "none"],
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_longest_episodes_are_rehearsed_before_any_is_sampled_and_leave_no_trace(
    toy_of_rl,  # noqa: F811
    paid,  # noqa: F811
    tmp_path,
    algorithm,
    request,
    monkeypatch,
):
    questions = ["--eval-data", str(tmp_path / "questions.jsonl"), "--eval-questions", "2"]
    flags = ["--algorithm", algorithm, *ALGORITHMS[algorithm], *questions]
    assert run_rl(toy_of_rl, tmp_path / "plain", *flags) == 0
    passes = request.getfixturevalue("rehearsing")
    run = Engine.run
    pass_counts = []
    monkeypatch.setattr(Engine, "run", lambda self, *args: (pass_counts.append(len(passes)), run(self, *args))[1])
    read, scored = TeacherInTurns.read, []  # tokens of what a teacher is given, and passes before it
    tokens_of = lambda batch: (sum(map(len, batch.token_rows())), len(passes))  # noqa: E731
    monkeypatch.setattr(TeacherInTurns, "read", lambda self, b: (scored.append(tokens_of(b)), read(self, b))[1])
    assert run_rl(toy_of_rl, tmp_path / "rehearsed", *flags) == 0
    assert scored[:1] == ([(3 * 64, 0)] if algorithm == "dgpo" else [])
    assert passes[0] == max(passes) == 3 * 64  # --micro-batch-size episodes of --max-length tokens
    assert pass_counts[:2] == [1, 1] and len(pass_counts) == 4  # a validation before the two rounds and one after them
    assert_same_runs(tmp_path / "plain", tmp_path / "rehearsed", 2)
    one, two = (checkpoint.read(tmp_path / name / "checkpoint-2").state["kept"] for name in ("plain", "rehearsed"))
    assert one == two and {"guard", "memory"} <= one.keys()
    assert any(record["grad_norm"] for record in logged(tmp_path / "plain", "metrics.jsonl")[1:])


@pytest.mark.parametrize("fixed", [[], FIXED], ids=["smaller", "none smaller"])
def test_episodes_that_do_not_fit_fail_before_any_is_sampled(
    toy_of_rl,  # noqa: F811
    tmp_path,
    rehearsing,
    monkeypatch,
    capsys,
    fixed,
):
    run, sampling = Engine.run, []
    monkeypatch.setattr(Engine, "run", lambda self, *args: (sampling.append(self.grant.memory), run(self, *args))[1])
    failing(monkeypatch, Learner, "loss", {1})
    status = run_rl(toy_of_rl, tmp_path / "run", *fixed)
    stderr = capsys.readouterr().err
    if fixed:
        assert status == 1 and not sampling and "no size can be reduced further" in stderr and "Traceback" not in stderr
        assert list(checkpoint.folders_by_step(tmp_path / "run")) == []
    else:
        assert status == 0 and "the step is repeated with micro_batch_tokens 8192 -> 4096" in stderr
        assert {memory.micro_batch_tokens for memory in sampling} == {4096}


@pytest.mark.parametrize(
    ("algorithm", "rounds"),
    [("ppo", 12), *(pytest.param(name, 300, marks=pytest.mark.slow) for name in ("ppo", "grpo"))],
)
def test_live_bytes_do_not_drift_over_rounds_of_changing_lengths(cold, tmp_path, monkeypatch, algorithm, rounds):
    counter, live, step = LiveTensors(), [], reinforcement.RLTrainer.step
    monkeypatch.setattr(
        reinforcement.RLTrainer, "step", lambda self, number: (step(self, number), live.append(counter.live))[0]
    )
    flags = ["--algorithm", algorithm, "--kl-beta", "0.05", "--max-steps", str(rounds), "--max-new-tokens", "32"]
    with counter:
        assert ppo.main([*rl_flags(cold, tmp_path / "run", *flags), "--save-every", "0"]) == 0
    lengths = {record["completions/mean_length"] for record in logged(tmp_path / "run", "metrics.jsonl")}
    assert len(live) == rounds and len(lengths) > rounds / 2
    assert max(live[4:]) - min(live[4:]) <= MIB
