"""The loop around a step, with a toy in place of a model: resuming to the bit, interruptions, the run folder."""

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from r3lite.core import run_files
from r3lite.core.errors import R3LiteError
from r3lite.core.exit_status import Terminated
from r3lite.core.invocation import with_values
from r3lite.devices.precision import NonFiniteGradients, Precision
from r3lite.settings import Common, ModelSettings, OptimizerSettings, Schedule, TrackSettings
from r3lite.training import checkpoint, loop, metrics, optim
from r3lite.training.oversight import NoOversight
from r3lite.training.run_folder import RunFolder
from r3lite.training.state import TrainState
from tests.errors import raises

TOTAL = 8


@dataclass(frozen=True)
class ToyConfig:
    """Toy."""

    common: Common = Common()
    schedule: Schedule = Schedule(save_every=3, keep_checkpoints=10)
    tracking: TrackSettings = TrackSettings()
    optimizer: OptimizerSettings = OptimizerSettings(learning_rate=0.01)
    model: ModelSettings = ModelSettings(model="tiny")


class StepLog:
    """Which steps were begun: state of the trainer's own."""

    def __init__(self):
        self.steps: list[int] = []

    def state_dict(self) -> dict:
        return {"steps": list(self.steps)}

    def load_state_dict(self, state: dict) -> None:
        self.steps = list(state["steps"])


class Toy:
    """Two groups of parameters, several optimizer steps a step, global random numbers, state of its own: as PPO has."""

    def __init__(self, dtype=torch.float32):
        torch.manual_seed(0)
        self.policy, self.value = torch.nn.Parameter(torch.randn(4, 4)), torch.nn.Parameter(torch.zeros(4))
        groups = [
            optim.ParameterGroup({"policy": self.policy}, 1e-2),
            optim.ParameterGroup({"value": self.value}, 1e-3),
        ]
        precision = Precision(dtype, torch.device("cpu"))
        self.step_log = StepLog()
        self.state = TrainState(
            optim.adamw(groups, 0.01), precision, 1.0, self.save_adapter, parts={"step_log": self.step_log}
        )
        self.total = TOTAL
        self.before_update = self.after_update = self.at_end = lambda number: None

    def save_adapter(self, folder: Path) -> None:
        (folder / "adapter_config.json").write_text(json.dumps({"sum": self.policy.sum().item()}))

    def step(self, number: int) -> tuple[dict, int]:
        self.step_log.steps.append(number)
        x = torch.randn(3, 4)
        self.before_update(number)
        for _ in range(2):
            with self.state.precision.autocast():
                loss = ((torch.nn.functional.dropout(x) @ self.policy + self.value).float() - 1).pow(2).mean()
            self.state.precision.backward(loss)
            norm, _ = self.state.update()
            self.after_update(number)
        self.at_end(number)
        return {"loss": loss.item(), "grad_norm": norm}, 12


def run(toy: Toy, command: str = "sft", default_output: str = "unused", **settings) -> bool:
    config = with_values(ToyConfig(), settings)
    with RunFolder(command, config, default_output) as folder:
        return loop.train(folder, toy)


def assert_same(toy: Toy, output: Path, other_toy: Toy, other_output: Path) -> None:
    """Weights, optimizer, random stream, recipe's state and metrics are equal to the bit."""
    assert torch.equal(toy.policy, other_toy.policy)
    assert torch.equal(toy.value, other_toy.value)
    tensors = optim.state_tensors(toy.state.optimizer)
    other_tensors = optim.state_tensors(other_toy.state.optimizer)
    assert tensors.keys() == other_tensors.keys()
    assert all(torch.equal(tensors[k], other_tensors[k]) for k in tensors)
    assert toy.step_log.steps == other_toy.step_log.steps
    assert toy.state.num_tokens == other_toy.state.num_tokens
    assert toy.state.precision.state_dict() == other_toy.state.precision.state_dict()
    logs = [[metrics.repeatable(r) for r in metrics.read(o / run_files.METRICS)] for o in (output, other_output)]
    assert logs[0] == logs[1]
    assert [r["step"] for r in logs[0]] == list(range(1, TOTAL + 1))
    states = [checkpoint.read(o / f"checkpoint-{TOTAL}").tensors["random"]["cpu"] for o in (output, other_output)]
    assert torch.equal(*states)


@pytest.fixture
def full_run(tmp_path):
    """A run that nothing interrupted."""
    toy, output = Toy(), tmp_path / "whole"
    assert run(toy, output=str(output))
    return toy, output


@pytest.mark.parametrize("stops", [(1,), (3,), (2, 4)])
def test_stopped_and_resumed_equals_uninterrupted_to_the_bit(tmp_path, full_run, stops):
    output = tmp_path / "parts"
    for stop in stops:
        assert not run(Toy(), output=str(output), stop_after=stop, resume="auto")
        assert not (output / "summary.json").exists()
    resumed = Toy()
    assert run(resumed, output=str(output), resume="auto")
    assert_same(*full_run, resumed, output)


def test_the_scaler_of_fp16_is_resumed_too(tmp_path):
    uninterrupted = Toy(torch.float16)
    run(uninterrupted, output=str(tmp_path / "whole"))
    run(Toy(torch.float16), output=str(tmp_path / "parts"), stop_after=3)
    resumed = Toy(torch.float16)
    run(resumed, output=str(tmp_path / "parts"), resume="auto")
    assert resumed.state.precision.skipped > 0  # the first scale is too large: a step has been skipped
    assert_same(uninterrupted, tmp_path / "whole", resumed, tmp_path / "parts")


def test_a_run_goes_on_in_another_folder_from_a_named_checkpoint(tmp_path, full_run):
    resumed, output = Toy(), tmp_path / "fork"
    assert run(resumed, output=str(output), resume=str(full_run[1] / "checkpoint-3"))
    assert_same(*full_run, resumed, output)
    assert list(checkpoint.folders_by_step(full_run[1])) == [3, 6, 8]  # untouched
    assert list(checkpoint.folders_by_step(output)) == [6, 8]


def test_a_run_says_what_it_resumes(tmp_path, capsys):
    """`--resume auto` of a mistyped --output started from nothing without a word."""
    output = str(tmp_path / "run")
    assert not run(Toy(), output=output, resume="auto", stop_after=2)
    assert f"{output} has no checkpoint to resume: a new run begins\n" in capsys.readouterr().err
    assert not run(Toy(), output=output, resume="auto", stop_after=2)
    assert f"continuing from {Path(output, 'checkpoint-2')}\n" in capsys.readouterr().err
    assert not run(Toy(), output=str(tmp_path / "fork"), resume=output, stop_after=1)
    assert f"continuing from {Path(output, 'checkpoint-4')}\n" in capsys.readouterr().err
    assert not run(Toy(), output=str(tmp_path / "new"), stop_after=1)
    assert "resume:" not in capsys.readouterr().err
    with raises(R3LiteError, "resume-absent", "did you mean", "fork"):
        run(Toy(), resume=str(tmp_path / "frok"))


def test_going_back_to_a_checkpoint_removes_what_came_after_it(tmp_path, full_run, capsys):
    assert not run(Toy(), resume=str(full_run[1] / "checkpoint-3"), stop_after=1)
    assert list(checkpoint.folders_by_step(full_run[1])) == [3, 4]
    assert "removing" in capsys.readouterr().err
    assert not (full_run[1] / "summary.json").exists()  # the run is not complete any more
    assert [r["step"] for r in metrics.read(full_run[1] / run_files.METRICS)] == [1, 2, 3, 4]


def test_a_corrupt_newest_checkpoint_is_passed_over(tmp_path, full_run, capsys):
    output = tmp_path / "parts"
    run(Toy(), output=str(output), stop_after=7)
    (output / "checkpoint-7" / "weights.safetensors").write_bytes(b"torn")
    resumed = Toy()
    assert run(resumed, output=str(output), resume="auto")
    assert f"warning: skipping {output / 'checkpoint-7'}: " in capsys.readouterr().err
    assert_same(*full_run, resumed, output)


def test_no_sound_checkpoint_is_an_error_and_no_silent_fresh_start(tmp_path):
    run(Toy(), output=str(tmp_path), stop_after=2)
    (tmp_path / "checkpoint-2" / "manifest.json").unlink()
    with raises(R3LiteError, "no-valid-checkpoint"):
        run(Toy(), output=str(tmp_path), resume="auto")


def test_a_finished_run_resumed_is_left_as_it_is(tmp_path, full_run):
    _, output = full_run
    snapshot = {p: p.read_bytes() for p in output.rglob("*") if p.is_file() and p.name != "summary.json"}
    assert run(Toy(), output=str(output), resume="auto")
    assert snapshot == {p: p.read_bytes() for p in output.rglob("*") if p.is_file() and p.name != "summary.json"}


def test_what_a_run_folder_holds(full_run):
    toy, output = full_run
    files = {p.name for p in output.iterdir()}
    checkpoints = {f"checkpoint-{n}" for n in (3, 6, 8)}
    assert files == {"config.toml", "metrics.jsonl", "summary.json", "adapter", *checkpoints}
    summary = json.loads((output / "summary.json").read_text())
    assert summary["steps"] == TOTAL
    assert summary["num_tokens"] == 12 * TOTAL
    assert summary["last"]["step"] == TOTAL
    losses = [r["loss"] for r in metrics.read(output / run_files.METRICS)]
    assert summary["mean"]["loss"] == pytest.approx(sum(losses) / TOTAL)
    assert json.loads((output / "adapter" / "adapter_config.json").read_text()) == {"sum": toy.policy.sum().item()}
    assert (output / "checkpoint-8" / "adapter" / "adapter_config.json").exists()


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    run(Toy(), output=str(tmp_path), save_every=2, keep_checkpoints=2)
    assert list(checkpoint.folders_by_step(tmp_path)) == [6, 8]


def test_the_saved_config_goes_on_with_the_run(tmp_path):
    """It must not hold how this process was started: with its stop_after every resumed run would stop again."""
    run(Toy(), output=str(tmp_path / "x"), stop_after=2)
    text = (tmp_path / "x" / "config.toml").read_text()
    assert "stop_after" not in text
    assert "resume" not in text
    assert json.dumps(str(tmp_path / "x")) in text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": 0.5, "seed": 3}, r"learning_rate \(was 0.01, is 0.5\), seed \(was 0, is 3\)"),
        ({"max_steps": 99}, r"max_steps \(was None, is 99\)"),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path, settings, message):
    run(Toy(), output=str(tmp_path), stop_after=2)
    with pytest.raises(R3LiteError, match=message) as error:
        run(Toy(), output=str(tmp_path), resume="auto", **settings)
    assert "config.toml" in error.value.remedy
    assert run(Toy(), output=str(tmp_path), resume="auto", save_every=5, keep_checkpoints=1)  # change no number


def test_a_run_that_is_older_than_a_setting_is_resumed_with_its_default_only(tmp_path, monkeypatch):
    """A setting that the checkpoint lacked counted as None, so a new one ended all older runs."""
    run(Toy(), output=str(tmp_path), stop_after=2)
    read = checkpoint.read

    def older(folder):
        loaded = read(folder)
        del loaded.state["settings"]["warmup"], loaded.state["settings"]["weight_decay"]
        return loaded

    monkeypatch.setattr(checkpoint, "read", older)
    with raises(R3LiteError, "resume-settings-differ", "weight_decay (was 0.0, is 0.5"):
        run(Toy(), output=str(tmp_path), resume="auto", weight_decay=0.5)
    assert run(Toy(), output=str(tmp_path), resume="auto")


def test_other_data_command_dtype_or_weights_are_refused(tmp_path):
    run(Toy(), output=str(tmp_path), stop_after=2)
    snapshot = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    other_toy = Toy()
    other_toy.state.data = "other rows"
    with raises(R3LiteError, "data-changed"):
        run(other_toy, output=str(tmp_path), resume="auto")
    with raises(R3LiteError, "checkpoint-of-other-command", "sft", "ppo"):
        run(Toy(), "ppo", output=str(tmp_path), resume="auto")
    with raises(R3LiteError, "checkpoint-precision-differs", "dtype"):
        run(Toy(torch.bfloat16), output=str(tmp_path), resume="auto")
    smaller = Toy()
    smaller.state.optimizer = optim.adamw([optim.ParameterGroup({"policy": smaller.policy}, 1.0)], 0.0)
    with raises(R3LiteError, "checkpoint-weights-differ", "value"):
        run(smaller, output=str(tmp_path), resume="auto")
    assert snapshot == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}  # a refusal touches nothing


def test_a_folder_of_another_run_is_refused(tmp_path, full_run):
    for settings in ({"output": str(full_run[1])}, {"output": str(tmp_path), "resume": str(full_run[1])}):
        with raises(R3LiteError, "output-not-empty"):
            run(Toy(), **settings)
    with raises(R3LiteError, "resume-absent"):
        run(Toy(), resume=str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with raises(R3LiteError, "no-valid-checkpoint"):
        run(Toy(), resume=str(tmp_path / "empty"))
    with pytest.raises(R3LiteError, match="--output"):
        run(Toy(), resume="auto")
    assert run(Toy(), default_output=str(tmp_path / "default"))  # no --output: where the recipe says


def test_what_a_kill_left_half_written_is_swept(tmp_path):
    run(Toy(), output=str(tmp_path), stop_after=2)
    (tmp_path / ".checkpoint-3.new.part").mkdir()
    (tmp_path / ".config.toml.123.part").write_text("")
    run(Toy(), output=str(tmp_path), resume="auto", stop_after=1)
    assert not list(tmp_path.glob(".*"))


def interrupt(number, at: int, which: signal.Signals) -> None:
    if number == at:
        os.kill(os.getpid(), which)


posix = pytest.mark.skipif(os.name == "nt", reason="os.kill ends the process on Windows")


@posix
@pytest.mark.parametrize(("which", "error"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)])
@pytest.mark.parametrize(("moment", "saved"), [("before_update", 4), ("after_update", 5), ("at_end", 5)])
def test_an_interrupted_run_saves_and_resumes_to_the_bit(tmp_path, full_run, which, error, moment, saved):
    """Before the first update of a step the step has not been; after it the step must be whole."""
    output, toy = tmp_path / "parts", Toy()
    pending_signals = [which]
    setattr(toy, moment, lambda number: number == 5 and pending_signals and interrupt(number, 5, pending_signals.pop()))
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.raises(error):
        run(toy, output=str(output))
    assert list(checkpoint.folders_by_step(output)) == [3, saved]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    resumed = Toy()
    assert run(resumed, output=str(output), resume="auto")
    assert_same(*full_run, resumed, output)


@posix
def test_ctrl_c_twice_leaves_at_once(tmp_path):
    toy = Toy()
    toy.after_update = lambda number: interrupt(number, 5, signal.SIGINT)  # after each of two updates
    with pytest.raises(KeyboardInterrupt):
        run(toy, output=str(tmp_path))
    assert list(checkpoint.folders_by_step(tmp_path)) == [3]


@posix
def test_interrupted_in_its_first_step_a_run_has_nothing_to_save_and_says_how_to_begin_again(tmp_path, capsys):
    toy = Toy()
    toy.before_update = lambda number: interrupt(number, 1, signal.SIGTERM)
    with pytest.raises(Terminated):
        run(toy, output=str(tmp_path))
    assert checkpoint.folders_by_step(tmp_path) == {}
    command = f"python -m r3lite.sft --config {tmp_path / 'config.toml'} --resume auto"
    assert f"no checkpoint was written; begin again with: {command}\n" in capsys.readouterr().err
    assert run(Toy(), output=str(tmp_path), resume="auto")  # a fresh start
    assert "has all of its" not in capsys.readouterr().err
    assert run(Toy(), output=str(tmp_path), resume="auto")
    assert f"the run has all of its {TOTAL} steps" in capsys.readouterr().err


class ValidatesFirst(NoOversight):
    """Has a validation before the first step, after which the loop writes the checkpoint of step 0."""

    def begin(self, done: int) -> dict | None:
        return None if done else {"step": 0}


@posix
@pytest.mark.parametrize("failure", [Terminated, R3LiteError("no server", "Start one.", code="server-absent")])
def test_a_run_with_the_checkpoint_of_step_0_alone_says_how_to_go_on(tmp_path, capsys, failure):
    toy = Toy()

    def fail(number):
        if failure is Terminated:
            interrupt(number, 1, signal.SIGTERM)
        else:
            raise failure

    toy.before_update = fail
    config = with_values(ToyConfig(), {"output": str(tmp_path)})
    expected = Terminated if failure is Terminated else R3LiteError
    with pytest.raises(expected), RunFolder("sft", config, "unused") as folder:
        loop.train(folder, toy, oversight=ValidatesFirst())
    assert list(checkpoint.folders_by_step(tmp_path)) == [0]
    command = f"python -m r3lite.sft --config {tmp_path / 'config.toml'} --resume auto"
    assert f"saved step 0; continue with: {command}\n" in capsys.readouterr().err


def test_gradients_that_are_not_finite_are_explained(tmp_path):
    toy = Toy()
    toy.explain_overflow = lambda: "model.layers.1 was the first layer to give inf or nan"

    def spoil(number):
        if number == 2:
            with torch.no_grad():
                toy.value.fill_(float("nan"))

    toy.before_update = spoil
    with pytest.raises(NonFiniteGradients, match=r"model\.layers\.1"):
        run(toy, output=str(tmp_path))


def test_a_checkpoint_that_cannot_be_written_is_told_with_a_remedy(tmp_path):
    toy = Toy()

    def full(folder):
        raise OSError(28, "No space left on device")

    toy.state.save_adapter = full
    with raises(R3LiteError, "run-unwritable", "step 3", "No space left") as error:
        run(toy, output=str(tmp_path))
    assert "--resume auto" in error.value.remedy
