"""Between the steps of a run: validations, the best checkpoint, and rollbacks when the guard raises an alarm.

Knows no algorithm and no data: the command hands in the validation.
"""

import sys
import time
from typing import Protocol

from tqdm import tqdm

from r3lite.core.config import flag
from r3lite.core.errors import NotFinite, R3LiteError
from r3lite.core.inherited import ADAPTER
from r3lite.core.spans import NO_SPANS, Spans
from r3lite.settings import ValidationSettings
from r3lite.training import checkpoint
from r3lite.training.guard import Alarm, Guard
from r3lite.training.run_folder import RunFolder
from r3lite.training.state import TrainState


class Collapse(R3LiteError):
    """A limit of the guard was crossed once more after the last rollback."""


class Validator(Protocol):
    """Measures the model on held-out questions."""

    def measure(self) -> tuple[dict, list[float] | None]:
        """The metrics, and the F1 of each question in an order that never changes.

        None instead of the F1s if the retriever failed on a question; the metric `retrieval_failures` counts those.
        """


class NoOversight:
    """The oversight of a run that is neither validated nor guarded, such as SFT: it does nothing between the steps."""

    rate_scale = 1.0
    can_go_back = False

    def begin(self, done: int) -> dict | None:
        return None

    def after(self, step: int, record: dict, failure: NotFinite | None = None) -> tuple[dict, bool]:
        return {}, False

    def end_step(self, step: int) -> None:
        pass


NO_OVERSIGHT = NoOversight()


class Oversight:
    """Validates, guards and rolls back one run. The numbers of the guard are among the parts of the run's state."""

    def __init__(
        self,
        run: RunFolder,
        state: TrainState,
        guard: Guard,
        settings: ValidationSettings,
        total: int,
        validation: Validator | None,
        spans: Spans = NO_SPANS,
        penalizes_kl: bool = False,
    ):
        """`total` are the steps of the run. With `penalizes_kl`, --kl-beta is above 0, and a rollback raises it."""
        self.run = run
        self.state = state
        self.guard = guard
        self.settings = settings
        self.total = total
        self.validation = validation
        self.spans = spans
        self.penalizes_kl = penalizes_kl
        self.collapse: Collapse | None = None  # the reason why the run must end

    @property
    def best(self) -> int | None:
        """The step with the best validation; None if there was none."""
        if self.guard.best is None:
            return None
        return self.guard.best.step

    @property
    def rate_scale(self) -> float:
        """The factor of the learning rates after the rollbacks so far."""
        return self.guard.rate_scale

    def begin(self, done: int) -> dict | None:
        """Called after `run.restore_or_start`, with the steps taken; returns the record of a validation before step 1.

        None if there is no such validation. With a record, the caller must write a checkpoint of step 0: it stays the
        best one if the run gets worse in its first step.
        """
        if self.best is not None and not self.run.keep(self.best):
            cause = f"the best checkpoint, of step {self.best}, was deleted"
            print(f"warning: {cause}; the next validation counts as the best", file=sys.stderr)
            self.guard.best = None
        if self.validation is None or done or self.best is not None:
            return None
        metrics, each = self._validate(0)
        if each is not None:
            self.guard.take_validation(0, each)
        return {"step": 0, **metrics}

    @property
    def can_go_back(self) -> bool:
        """Says if an alarm restores the weights of the best checkpoint, instead of only printing a warning."""
        return self.guard.settings.guard == "roll-back" and self.best is not None

    def after(self, step: int, record: dict, failure: NotFinite | None = None) -> tuple[dict, bool]:
        """Called after each step with its record; returns further metrics, and if a checkpoint must be written.

        `failure` is the error that ended the step early. Like a NotFinite of the validation, it counts as an alarm; it
        is raised if there is no checkpoint to go back to, because weights that are nan stay nan.
        """
        metrics: dict = {}
        each = None
        is_due = step % self.settings.eval_every == 0 or step == self.total
        if failure is None and self.validation and is_due:
            try:
                metrics, each = self._validate(step)
            except NotFinite as error:
                failure = error
        if failure is None:
            alarm = self.guard.check(step, record, each)
        elif self.can_go_back:
            alarm = Alarm(None, failure.cause.splitlines()[0])
        else:
            raise failure
        if self.validation is not None:
            metrics["guard/rollbacks"] = self.guard.rollbacks
        must_save = self.best == step
        if alarm is not None:
            metrics["guard/alarm"] = alarm.limit or "not_finite"
            restored = self._heed(step, alarm)
            must_save = must_save or restored
        return metrics, must_save

    def end_step(self, step: int) -> None:
        """Called after each step, when its checkpoint, if due, is written; raises Collapse if the run must end."""
        if self.best == step:
            self.run.keep(step)
        if self.collapse is not None:
            self.run.write_adapter(self.state, self.best)
            raise self.collapse

    def note(self) -> str:
        """Says at the end of the run which adapter is the best and where the last one is; empty without validation."""
        best = self.guard.best
        if best is None:
            return ""
        message = f", of step {best.step}, the best by validation F1 ({best.f1:.3f})"
        if best.step != self.total:
            message += f"; the last one: {self.run.output / f'checkpoint-{self.total}' / ADAPTER}"
        return message

    def _validate(self, step: int) -> tuple[dict, list[float] | None]:
        start = time.perf_counter()
        with self.spans.span("validate"):
            metrics, each = self.validation.measure()
        if each is None:
            cause = f"the retriever failed on {metrics['retrieval_failures']} validation questions"
            _say(f"warning: step {step}: {cause}; it is ignored")
        named = {f"eval/{name}": value for name, value in metrics.items()}
        named["time/validate"] = time.perf_counter() - start
        return named, each

    def _heed(self, step: int, alarm: Alarm) -> bool:
        """Prints an alarm and acts on it: warns, rolls back or ends the run; returns if weights have changed."""
        guard = self.guard
        problem = f"step {step}: {alarm.message}"
        if alarm.limit:
            problem += f" ({flag(alarm.limit)})"
        if not self.can_go_back:
            hint = "" if guard.settings.guard == "warn" else "; a rollback needs --eval-data"
            _say(f"warning: {problem}: the run may be collapsing{hint}")
            return False
        best = f"step {guard.best.step} (validation F1 {guard.best.f1:.3f})"
        if self.best != step:  # if equal, the weights are in place, and their checkpoint is not written yet
            folder = self.run.output / f"checkpoint-{self.best}"
            self.state.go_back(self.run.ranks.from_first(lambda: checkpoint.read(folder)))
        if guard.rollbacks == guard.settings.guard_rollbacks:
            guard.forget()
            cause = f"the run collapsed again after {guard.rollbacks} rollbacks"
            _say(f"{problem}; {cause} and stops with the weights of {best}")
            remedy = f"The best adapter, of {best}, is in {self.run.output / 'adapter'}. Start a new run from it "
            remedy += "(--adapter) with a lower --learning-rate, a higher --kl-beta or other rewards; or continue with "
            remedy += f"{self.run.resume_command} --guard off."
            self.collapse = Collapse(f"{cause}: {alarm.message}", remedy, code="collapse")
            return True
        guard.rolled_back()
        scale = f"learning rate x {guard.rate_scale:g}"
        if self.penalizes_kl:
            scale += f", KL weight x {guard.kl_scale:g}"
        _say(f"{problem}; rollback {guard.rollbacks} of {guard.settings.guard_rollbacks} to {best}, {scale}")
        return True


def _say(line: str) -> None:
    tqdm.write(line, file=sys.stderr)
