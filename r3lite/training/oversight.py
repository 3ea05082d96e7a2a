"""Between the steps of a run: validations, the best checkpoint, and rollbacks when the guard raises an alarm.

Knows no algorithm and no data: the command hands in the validation.
"""

import sys
import time
from typing import Protocol

from tqdm import tqdm

from r3lite.core.config import flag
from r3lite.core.errors import NotFinite, R3LiteError
from r3lite.core.spans import Spans, span
from r3lite.settings import ValidationSettings
from r3lite.training import checkpoint
from r3lite.training.guard import Alarm, Guard
from r3lite.training.run_folder import RunFolder
from r3lite.training.state import TrainState


class Collapse(R3LiteError):
    """A limit of the guard was crossed once more after the last rollback."""


class Validation(Protocol):
    """Measures the model on held-out questions."""

    def measure(self) -> tuple[dict, list[float] | None]:
        """The metrics, and the F1 of each question in an order that never changes.

        None instead of the F1s if the retriever failed on a question; the metric `retrieval_failures` counts those.
        """


class Oversight:
    """Between the steps of one run. What the guard has seen is among the parts of the run's state."""

    def __init__(
        self, run: RunFolder, state: TrainState, guard: Guard, settings: ValidationSettings, total: int,
        validation: Validation | None, spans: Spans | None = None,
    ):  # fmt: skip
        self.run, self.state, self.guard, self.settings = run, state, guard, settings
        self.total, self.validation, self.spans = total, validation, spans
        self.collapse: Collapse | None = None  # why the run must end

    @property
    def best(self) -> int | None:
        """The step with the best validation; None if there was none."""
        return None if self.guard.best is None else self.guard.best.step

    def begin(self, done: int) -> dict | None:
        """Called after `run.begin`, with the steps taken; the metrics of a validation before the first step.

        With these, a checkpoint must be written: of a run that gets worse in its first step it is the best one.
        """
        if self.best is not None and not self.run.keep(self.best):
            lost = f"the best checkpoint, of step {self.best}, was deleted; the next validation counts as the best"
            print(f"warning: {lost}", file=sys.stderr)
            self.guard.best = None
        if self.validation is None or done or self.best is not None:
            return None
        found, each = self._validate(0)
        if each is not None:
            self.guard.validated(0, each)
        return {"step": 0, **found}

    @property
    def can_go_back(self) -> bool:
        """Whether an alarm restores the weights of the best checkpoint, instead of only printing a warning."""
        return self.guard.settings.guard == "roll-back" and self.best is not None

    def after(self, step: int, record: dict, failure: NotFinite | None = None) -> tuple[dict, bool]:
        """Called after each step with its metrics: further metrics, and whether a checkpoint must be written.

        `failure`: why the step could not be taken to its end. It is an alarm, as is one of the validation, and raised
        if there is no going back: weights that are nan stay nan.
        """
        found, each = {}, None
        if failure is None and self.validation and (step % self.settings.eval_every == 0 or step == self.total):
            try:
                found, each = self._validate(step)
            except NotFinite as error:
                failure = error
        if failure is None:
            alarm = self.guard.look(step, record, each)
        elif self.can_go_back:
            alarm = Alarm(None, failure.cause.splitlines()[0])
        else:
            raise failure
        if self.validation is not None:
            found["guard/rollbacks"] = self.guard.rollbacks
        must_save = self.best == step
        if alarm is not None:
            found["guard/alarm"] = alarm.limit or "not_finite"
            must_save |= self._heed(step, alarm)
        return found, must_save

    def saved(self, step: int) -> None:
        """Called when the step's record and checkpoint are written; raises Collapse if the run must end."""
        if self.best == step:
            self.run.keep(step)
        if self.collapse is not None:
            self.run.write_adapter(self.state, self.best)
            raise self.collapse

    def note(self) -> str:
        """At the end of the run: which adapter is the best one, and where the last one is; empty without validation."""
        best = self.guard.best
        if best is None:
            return ""
        message = f", of step {best.step}, the best by validation F1 ({best.f1:.3f})"
        if best.step != self.total:
            message += f"; the last one: {self.run.output / f'checkpoint-{self.total}' / checkpoint.ADAPTER}"
        return message

    def _validate(self, step: int) -> tuple[dict, list[float] | None]:
        start = time.perf_counter()
        with span(self.spans, "validate"):
            found, each = self.validation.measure()
        if each is None:
            failed = f"the retriever failed on {found['retrieval_failures']} validation questions"
            _say(f"warning: step {step}: {failed}; it is ignored")
        measured = {f"eval/{name}": value for name, value in found.items()}
        return measured | {"time/validate": time.perf_counter() - start}, each

    def _heed(self, step: int, alarm: Alarm) -> bool:
        """Prints an alarm and acts on it: warns, rolls back or ends the run; returns whether weights have changed."""
        s, guard = self.guard.settings, self.guard
        wrong = f"step {step}: {alarm.message}" + (f" ({flag(alarm.limit)})" if alarm.limit else "")
        if not self.can_go_back:
            why = "" if s.guard == "warn" else "; a rollback needs --eval-data"
            _say(f"warning: {wrong}: the run may be collapsing{why}")
            return False
        best = f"step {guard.best.step} (validation F1 {guard.best.f1:.3f})"
        if self.best != step:  # whose checkpoint is yet to be written
            folder = self.run.output / f"checkpoint-{self.best}"
            self.state.go_back(self.run.ranks.shared(lambda: checkpoint.read(folder)))
        if guard.rollbacks == s.guard_rollbacks:
            guard.forget()
            cause = f"the run collapsed again after {guard.rollbacks} rollbacks"
            _say(f"{wrong}; {cause} and stops with the weights of {best}")
            remedy = f"The best adapter, of {best}, is in {self.run.output / 'adapter'}. Start a new run from it "
            remedy += "(--adapter) with a lower --learning-rate, a higher --kl-beta or other rewards; or continue with "
            remedy += f"{self.run.how_to_go_on} --guard off."
            self.collapse = Collapse(f"{cause}: {alarm.message}", remedy)
            return True
        guard.rolled_back()
        scale = f"learning rate x {guard.rate_scale:g}"
        if self.run.settings.get("kl_beta"):
            scale += f", KL weight x {guard.kl_scale:g}"
        _say(f"{wrong}; rollback {guard.rollbacks} of {s.guard_rollbacks} to {best}, {scale}")
        return True


def _say(line: str) -> None:
    tqdm.write(line, file=sys.stderr)
