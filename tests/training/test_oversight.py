"""Validation, the best checkpoint and rollbacks in the loop, with a toy in place of a model."""

import json

import pytest
import torch

from r3lite.core import run_files
from r3lite.core.errors import NotFinite
from r3lite.core.invocation import with_values
from r3lite.settings import GuardSettings, ValidationSettings
from r3lite.training import checkpoint, loop, metrics
from r3lite.training.guard import Guard
from r3lite.training.kl_budget import STATE, KlBudget
from r3lite.training.oversight import Collapse, Oversight
from r3lite.training.run_folder import RunFolder
from tests.training.test_loop import TOTAL, Toy, ToyConfig, assert_same

QUESTIONS = 64


class Script:
    """Validations whose F1 is what a test says, by how often the toy has been validated. (Not part of its state.)"""

    def __init__(self, toy: "Watched"):
        self.toy = toy

    def measure(self) -> tuple[dict, list[float]]:
        f1 = self.toy.f1s[len(self.toy.step_log.steps)]
        right = round(f1 * QUESTIONS)
        return {"f1": f1}, [1.0] * right + [0.0] * (QUESTIONS - right)


class Watched(Toy):
    """A toy some of whose steps are malformed. (Making one seeds the random stream that all share.)"""

    def __init__(self, f1s: list[float], bad: range = range(0)):
        super().__init__()
        self.f1s, self.bad = f1s, bad
        self.guard = Guard(GuardSettings(guard_patience=2, guard_rollbacks=1), 64)
        self.state.parts["guard"] = self.guard
        self.rates: list[float] = []
        self.kl_scales: list[float] = []

    def step(self, number: int) -> tuple[dict, int]:
        self.rates.append(self.state.optimizer.param_groups[0]["lr"])
        self.kl_scales.append(self.guard.kl_scale)
        record, tokens = super().step(number)
        extra_metrics = {"malformed_ratio": float(number in self.bad), "completions/clipped_ratio": 0.0}
        return record | extra_metrics, tokens


def build_oversight(folder: RunFolder, toy: Watched, validation: Script | None) -> Oversight:
    return Oversight(
        folder,
        state=toy.state,
        guard=toy.guard,
        settings=ValidationSettings(eval_every=2),
        total=TOTAL,
        validation=validation,
        penalizes_kl=True,
    )


def run(toy: Watched, validated: bool = True, **settings) -> bool:
    config = with_values(ToyConfig(), {"save_every": 0, "keep_checkpoints": 1} | settings)
    with RunFolder("ppo", config, "unused") as folder:
        validation = Script(toy) if validated else None
        oversight = build_oversight(folder, toy, validation)
        return loop.train(folder, toy, oversight)


RISING = [0.2, 0, 0.4, 0, 0.8, 0, 0.6, 0, 0.7]  # best after step 4
COLLAPSE = {"f1s": RISING, "bad": range(6, 8)}  # told at step 7


def weights(output, step: int) -> dict:
    return checkpoint.read(output / f"checkpoint-{step}").tensors["weights"]


def test_the_best_checkpoint_is_kept_beside_the_newest_and_is_the_adapter(tmp_path):
    assert run(Watched(RISING), output=str(tmp_path))
    assert list(checkpoint.folders_by_step(tmp_path)) == [4, 8]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["adapter_step"], summary["steps"]) == (4, 8)
    best, last = (json.loads((tmp_path / f"checkpoint-{n}/adapter/adapter_config.json").read_text()) for n in (4, 8))
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text()) == best != last
    f1s = {r["step"]: r["eval/f1"] for r in metrics.read(tmp_path / run_files.METRICS) if "eval/f1" in r}
    assert f1s == {0: 0.2, 2: 0.4, 4: 0.8, 6: 0.6, 8: 0.7}


def test_without_validation_the_last_adapter_is_the_adapter_and_alarms_are_told_only(tmp_path, capsys):
    assert run(Watched(**COLLAPSE), validated=False, output=str(tmp_path))
    assert list(checkpoint.folders_by_step(tmp_path)) == [8]
    assert json.loads((tmp_path / "summary.json").read_text())["adapter_step"] == 8
    guard_lines = [line for line in capsys.readouterr().err.splitlines() if "guard" in line]
    assert guard_lines == [
        "warning: step 7: 100% of the episodes are malformed or cut off (0% at the start), 2 rounds in a row "
        "(--guard-malformed): the run may be collapsing; a rollback needs --eval-data"
    ]


def test_a_collapse_goes_back_to_the_best_weights_and_on_with_smaller_steps(tmp_path, capsys):
    plain = Watched(RISING)
    assert run(plain, output=str(tmp_path / "plain"))
    assert not run(Watched(**COLLAPSE), output=str(tmp_path / "run"), stop_after=7)
    # After step 7 the run is where it was after step 4, but for what counts its steps.
    assert all(torch.equal(w, weights(tmp_path / "plain", 4)[name]) for name, w in weights(tmp_path / "run", 7).items())
    moments = [checkpoint.read(tmp_path / f).tensors["optimizer"] for f in ("plain/checkpoint-4", "run/checkpoint-7")]
    assert all(torch.equal(moment, moments[1][name]) for name, moment in moments[0].items())
    toy = Watched(**COLLAPSE)
    assert run(toy, output=str(tmp_path / "run"), resume="auto")
    assert toy.rates == [pytest.approx(plain.rates[-1] / 4)] and toy.kl_scales == [2.0]
    guard_lines = [line for line in capsys.readouterr().err.splitlines() if "guard" in line]
    assert guard_lines == [
        "step 7: 100% of the episodes are malformed or cut off (0% at the start), 2 rounds in a row (--guard-malformed)"
        "; rollback 1 of 1 to step 4 (validation F1 0.797), learning rate x 0.25, KL weight x 2"
    ]
    records = {r["step"]: r for r in metrics.read(tmp_path / "run" / run_files.METRICS)}
    assert {s: r.get("guard/alarm") for s, r in records.items() if "guard/alarm" in r} == {7: "guard_malformed"}
    assert records[7]["guard/rollbacks"] == 0 and records[8]["guard/rollbacks"] == 1


@pytest.mark.parametrize("stop", range(1, TOTAL))
def test_stopped_anywhere_and_resumed_equals_uninterrupted(tmp_path, stop):
    uninterrupted = Watched(**COLLAPSE)
    output = tmp_path / "parts"
    assert run(uninterrupted, output=str(tmp_path / "whole"))
    assert not run(Watched(**COLLAPSE), output=str(output), stop_after=stop, save_every=3)
    resumed = Watched(**COLLAPSE)
    assert run(resumed, output=str(output), resume="auto")
    assert resumed.guard.state_dict() == uninterrupted.guard.state_dict() and uninterrupted.guard.rollbacks == 1
    same_metrics = [
        [metrics.repeatable(r) for r in metrics.read(o / run_files.METRICS)] for o in (tmp_path / "whole", output)
    ]
    assert same_metrics[0] == same_metrics[1]
    assert all(torch.equal(w, weights(output, TOTAL)[name]) for name, w in weights(tmp_path / "whole", TOTAL).items())


class Budgeted(Watched):
    """A toy whose learning rate a KL budget scales."""

    def __init__(self, f1s: list[float], bad: range = range(0)):
        super().__init__(f1s, bad)
        self.budget = KlBudget(0.04, [1.0] * TOTAL, self.state.optimizer, self.state.precision)
        self.state.parts["kl_budget"] = self.budget
        self.paths: list[float] = []  # at the beginning of each step

    def step(self, number: int) -> tuple[dict, int]:
        self.paths.append(self.budget.path)
        self.budget.begin(number)
        assert self.budget.judge_last_update((0.05 * self.budget.path) ** 2, 0.0)
        return super().step(number)


@pytest.mark.parametrize("stop", [4, 6, 7])
def test_the_path_of_a_kl_budget_goes_back_with_the_weights(tmp_path, stop):
    """The path stayed that of the collapsed weights. The best weights are those after step 4."""
    uninterrupted = Budgeted(**COLLAPSE)
    assert run(uninterrupted, output=str(tmp_path / "whole"))
    assert uninterrupted.paths[7] == uninterrupted.paths[4] < uninterrupted.paths[5]
    first, resumed = Budgeted(**COLLAPSE), Budgeted(**COLLAPSE)
    assert not run(first, output=str(tmp_path / "parts"), stop_after=stop)
    assert run(resumed, output=str(tmp_path / "parts"), resume="auto")
    assert first.paths + resumed.paths == uninterrupted.paths
    assert resumed.budget.state_dict().keys() == uninterrupted.budget.state_dict().keys()
    for name in STATE:
        assert getattr(resumed.budget, name) == getattr(uninterrupted.budget, name)


def test_after_the_last_rollback_the_update_of_the_collapse_cannot_be_taken_back(tmp_path):
    """The run may go on from the restored weights with --guard off; the first KL could bring the collapse back."""
    toy = Budgeted(**COLLAPSE)
    toy.guard.settings = GuardSettings(guard_patience=2, guard_rollbacks=0)
    with pytest.raises(Collapse):
        run(toy, output=str(tmp_path / "run"))
    assert toy.budget.undo == {}
    assert "kl_budget" not in checkpoint.read(tmp_path / "run/checkpoint-7").tensors


class Killed(BaseException):
    """The process ends here: nothing catches it."""


@pytest.mark.parametrize("at", range(1, TOTAL + 1))
def test_killed_anywhere_and_resumed_equals_uninterrupted(tmp_path, at):
    """In a step, whose rounds since the newest checkpoint are then taken again; the best checkpoint is a newest one."""

    def die(number: int) -> None:
        if number == at:
            raise Killed

    uninterrupted = Watched(**COLLAPSE)
    output = tmp_path / "parts"
    assert run(uninterrupted, output=str(tmp_path / "whole"))
    killed = Watched(**COLLAPSE)
    killed.at_end = die
    with pytest.raises(Killed):
        run(killed, output=str(output))
    resumed = Watched(**COLLAPSE)
    assert run(resumed, output=str(output), resume="auto")
    assert resumed.guard.state_dict() == uninterrupted.guard.state_dict()
    logs = [[metrics.repeatable(r) for r in metrics.read(o / run_files.METRICS)] for o in (tmp_path / "whole", output)]
    assert logs[0] == logs[1] and [r["step"] for r in logs[0]] == list(range(TOTAL + 1))
    assert all(torch.equal(w, weights(output, TOTAL)[name]) for name, w in weights(tmp_path / "whole", TOTAL).items())


def test_after_the_last_rollback_the_run_stops_with_the_reason_and_the_best_adapter(tmp_path, capsys):
    toy = Watched(RISING, bad=range(2, 9))
    with pytest.raises(
        Collapse, match=r"collapsed again after 1 rollbacks: 100% of the episodes are malformed"
    ) as error:
        run(toy, output=str(tmp_path))
    assert "The best adapter, of step 4 (validation F1 0.797), is in" in error.value.remedy
    assert "--guard off" in error.value.remedy
    best = json.loads((tmp_path / "checkpoint-4" / "adapter" / "adapter_config.json").read_text())
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text()) == best
    assert not (tmp_path / "summary.json").exists() and "continue with" not in capsys.readouterr().err
    step = max(checkpoint.folders_by_step(tmp_path))
    assert all(torch.equal(w, weights(tmp_path, 4)[name]) for name, w in weights(tmp_path, step).items())


def broken(at: int, late: bool = False, **toy) -> Watched:
    """A toy whose weights are nan when step `at` begins; it is noticed then, or after the first update of the step."""
    watched = Watched(**toy)
    watched.explain_overflow = lambda: "layer 3"

    def fail(number: int) -> None:
        if number == at:
            with torch.no_grad():
                watched.policy.fill_(float("nan"))
            if not late:
                raise NotFinite(
                    "question 7: the model's logits are not finite: layer 3\nmore", "Pass --dtype fp32.", code="broken"
                )

    watched.before_update, watched.after_update = (lambda n: None, fail) if late else (fail, lambda n: None)
    return watched


@pytest.mark.parametrize("late", [False, True])
def test_weights_that_are_nan_are_rolled_back(tmp_path, capsys, late):
    assert not run(broken(6, late, f1s=RISING), output=str(tmp_path), stop_after=6)
    assert all(torch.equal(w, weights(tmp_path, 4)[name]) for name, w in weights(tmp_path, 6).items())
    assert run(broken(6, late, f1s=RISING), output=str(tmp_path), resume="auto")
    rollback_lines = [line for line in capsys.readouterr().err.splitlines() if "rollback" in line]
    cause = (
        "the gradients are not finite (norm nan); nothing was updated"
        if late
        else ("question 7: the model's logits are not finite: layer 3")
    )
    assert rollback_lines == [
        f"step 6: {cause}; rollback 1 of 1 to step 4 (validation F1 0.797), learning rate x 0.25, KL weight x 2"
    ]
    records = {r["step"]: r for r in metrics.read(tmp_path / run_files.METRICS)}
    assert list(records) == list(range(TOTAL + 1)) and records[6]["guard/alarm"] == "not_finite"
    assert records[8]["guard/rollbacks"] == 1 and records[8]["loss"] is not None


@pytest.mark.parametrize("stop", [4, 5, 6, 7])
def test_stopped_around_a_rollback_from_nan_and_resumed_equals_uninterrupted(tmp_path, stop):
    uninterrupted, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(broken(6, f1s=RISING), output=str(uninterrupted))
    assert not run(broken(6, f1s=RISING), output=str(parts), stop_after=stop, save_every=3)
    assert run(broken(6, f1s=RISING), output=str(parts), resume="auto")
    logs = [[metrics.repeatable(r) for r in metrics.read(o / run_files.METRICS)] for o in (uninterrupted, parts)]
    assert logs[0] == logs[1]
    assert all(torch.equal(w, weights(parts, TOTAL)[name]) for name, w in weights(uninterrupted, TOTAL).items())


def test_a_validation_that_finds_nan_is_rolled_back(tmp_path):
    toy = Watched(RISING)
    measure = Script.measure

    class Nan(Script):
        def measure(self):
            if len(self.toy.step_log.steps) == 6:
                raise NotFinite("not a number", "", code="broken")
            return measure(self)

    config = with_values(ToyConfig(), {"save_every": 0, "output": str(tmp_path)})
    with RunFolder("ppo", config, "unused") as folder:
        oversight = build_oversight(folder, toy, Nan(toy))
        assert loop.train(folder, toy, oversight)
    records = {r["step"]: r for r in metrics.read(tmp_path / run_files.METRICS)}
    assert records[6]["guard/alarm"] == "not_finite" and "eval/f1" not in records[6] and toy.guard.rollbacks == 1


def test_a_run_that_goes_on_being_nan_stops_with_the_best_adapter(tmp_path):
    toy = broken(6, f1s=RISING)
    step, toy.before_update = toy.before_update, lambda n: step(6 if n > 5 else n)
    with pytest.raises(Collapse, match="after 1 rollbacks: question 7: the model's logits are not finite"):
        run(toy, output=str(tmp_path))
    assert all(torch.equal(w, weights(tmp_path, 4)[name]) for name, w in weights(tmp_path, 7).items())


@pytest.mark.parametrize(("validated", "guard"), [(False, "roll-back"), (True, "warn"), (True, "off")])
def test_without_a_way_back_nan_ends_the_run_as_it_is(tmp_path, capsys, validated, guard):
    toy = broken(6, f1s=RISING)
    toy.guard.settings = GuardSettings(guard=guard)
    with pytest.raises(NotFinite, match="question 7") as error:
        run(toy, validated=validated, output=str(tmp_path))
    assert error.value.remedy == "Pass --dtype fp32." and not (tmp_path / "summary.json").exists()


def test_a_run_that_goes_on_elsewhere_takes_its_best_checkpoint_along(tmp_path):
    uninterrupted = Watched(**COLLAPSE)
    assert run(uninterrupted, output=str(tmp_path / "whole"))
    assert not run(Watched(**COLLAPSE), output=str(tmp_path / "run"), stop_after=6)
    fork = Watched(**COLLAPSE)
    assert run(fork, output=str(tmp_path / "fork"), resume=str(tmp_path / "run"))
    assert list(checkpoint.folders_by_step(tmp_path / "fork")) == [4, 8]
    assert fork.guard.state_dict() == uninterrupted.guard.state_dict()
    assert list(checkpoint.folders_by_step(tmp_path / "run")) == [4, 6]


def test_a_best_checkpoint_that_is_gone_is_told_and_the_next_validation_counts(tmp_path, capsys):
    run(Watched(RISING), output=str(tmp_path), stop_after=5)
    checkpoint.remove(tmp_path / "checkpoint-4")
    assert run(Watched(RISING), output=str(tmp_path), resume="auto")
    assert "the best checkpoint, of step 4, was deleted" in capsys.readouterr().err
    assert json.loads((tmp_path / "summary.json").read_text())["adapter_step"] == 8  # 0.7 against 0.6


def test_a_checkpoint_of_an_earlier_version_has_no_guard_and_is_resumed(tmp_path):
    old = Watched(RISING)
    del old.state.parts["guard"]
    assert not run(old, validated=False, output=str(tmp_path), stop_after=3)
    assert run(Watched(RISING), validated=False, output=str(tmp_path), resume="auto")


def test_a_run_watched_and_not_watched_takes_the_same_steps(tmp_path):
    watched = Watched(RISING)
    assert run(watched, validated=False, output=str(tmp_path / "one"))
    unwatched = Watched(RISING)
    with RunFolder("ppo", with_values(ToyConfig(), {"output": str(tmp_path / "other")}), "unused") as folder:
        assert loop.train(folder, unwatched)
    assert_same(watched, tmp_path / "one", unwatched, tmp_path / "other")
