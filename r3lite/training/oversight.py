"""What happens between the steps of a run: validations, saving the best checkpoint, rollbacks at alarms of the guard.

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
    """The guard raised an alarm when all rollbacks that --guard-rollbacks allows had been made."""


class Validator(Protocol):
    """Measures the model on held-out questions."""

    def measure(self) -> tuple[dict, list[float] | None]:
        """Returns metrics, and the F1 of each question in an order that never changes.

        If the retriever failed on questions, there is None instead of the F1s; the metric `retrieval_failures` is the
        number of these questions.
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
    """Validates, guards and rolls back one run. The guard's own state is a part of the run's state."""

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
        """`total` is the number of steps of the run. `penalizes_kl`: whether --kl-beta is the weight of a KL.

        A rollback lowers the learning rate, and raises the weight of the KL penalty if there is one.
        """
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
        """The factor by which the rollbacks so far have lowered the learning rates."""
        return self.guard.rate_scale

    def begin(self, done: int) -> dict | None:
        """Called after `run.restore_or_start`, with the number of steps taken. Validates before step 1, if there is a
        validation, and returns its record; otherwise None.

        With a record, the caller must write a checkpoint of step 0. It remains the best one if the run gets worse from
        its first step on.
        """
        if self.best is not None and not self.run.keep_best(self.best):
            cause = f"the best checkpoint, of step {self.best}, was deleted"
            print(f"warning: {cause}; the next validation counts as the best", file=sys.stderr)
            self.guard.best = None
        if self.validation is None or done or self.best is not None:
            return None
        metrics, question_f1s = self._validate(0)
        if question_f1s is not None:
            self.guard.take_validation(0, question_f1s)
        return {"step": 0, **metrics}

    @property
    def can_go_back(self) -> bool:
        """True if an alarm restores the weights of the best checkpoint; False if it only prints a warning."""
        return self.guard.settings.guard == "roll-back" and self.best is not None

    def after(self, step: int, record: dict, failure: NotFinite | None = None) -> tuple[dict, bool]:
        """Called after each step with its record; returns further metrics, and whether a checkpoint must be written.

        `failure` is the error that ended the step early. It counts as an alarm, like a NotFinite of the validation.
        Without a checkpoint to go back to, the error is raised, because weights that are nan stay nan.
        """
        metrics: dict = {}
        question_f1s = None
        is_due = step % self.settings.eval_every == 0 or step == self.total
        if failure is None and self.validation and is_due:
            try:
                metrics, question_f1s = self._validate(step)
            except NotFinite as error:
                failure = error
        if failure is None:
            alarm = self.guard.check(step, record, question_f1s)
        elif self.can_go_back:
            alarm = Alarm(None, failure.cause.splitlines()[0])
        else:
            raise failure
        if self.validation is not None:
            metrics["guard/rollbacks"] = self.guard.rollbacks
        must_save = self.best == step
        if alarm is not None:
            metrics["guard/alarm"] = alarm.limit or "not_finite"
            restored = self._act_on(step, alarm)
            must_save = must_save or restored
        return metrics, must_save

    def end_step(self, step: int) -> None:
        """Called after each step, once its checkpoint is written if one is due; raises Collapse if the run must end."""
        if self.best == step:
            self.run.keep_best(step)
        if self.collapse is not None:
            self.run.write_adapter(self.state, self.best)
            raise self.collapse

    def note(self) -> str:
        """Returns for the end of the run which adapter is best and where the last one is; empty without validation."""
        best = self.guard.best
        if best is None:
            return ""
        message = f", of step {best.step}, the best by validation F1 ({best.f1:.3f})"
        if best.step != self.total:
            message += f"; the last one: {self.run.output / f'checkpoint-{self.total}' / ADAPTER}"
        return message

    def _validate(self, step: int) -> tuple[dict, list[float] | None]:
        """Returns the metrics of a validation under their names in the log, and the F1 of each question (`measure`)."""
        start = time.perf_counter()
        with self.spans.span("validate"):
            metrics, question_f1s = self.validation.measure()
        if question_f1s is None:
            cause = f"the retriever failed on {metrics['retrieval_failures']} validation questions"
            _say(f"warning: step {step}: {cause}; it is ignored")
        named_metrics = {f"eval/{name}": value for name, value in metrics.items()}
        named_metrics["time/validate"] = time.perf_counter() - start
        return named_metrics, question_f1s

    def _act_on(self, step: int, alarm: Alarm) -> bool:
        """Prints an alarm. Then it only warns, or restores the best checkpoint; after the last rollback it also sets
        `collapse`, with which `end_step` ends the run.

        Returns whether a checkpoint was restored.
        """
        guard = self.guard
        problem = f"step {step}: {alarm.message}"
        if alarm.limit:
            problem += f" ({flag(alarm.limit)})"
        if not self.can_go_back:
            hint = "" if guard.settings.guard == "warn" else "; a rollback needs --eval-data"
            _say(f"warning: {problem}: the run may be collapsing{hint}")
            return False
        best = f"step {guard.best.step} (validation F1 {guard.best.f1:.3f})"
        if self.best != step:  # else the model has the best weights now, and their checkpoint is not written yet
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
