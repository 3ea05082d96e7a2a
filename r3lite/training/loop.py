"""The training loop: learning rate, steps, log, checkpoints, interruptions.

Knows no algorithm: a `Trainer` takes the steps. A step of SFT is one optimizer step; a step of RL is a round of
rollouts with several optimizer steps.
"""

import sys
import time
from dataclasses import dataclass
from typing import Protocol

from r3lite.core.command import Terminated
from r3lite.core.errors import NotFinite, R3LiteError
from r3lite.core.spans import Spans, span
from r3lite.devices.precision import NonFiniteGradients
from r3lite.training import metrics, optim
from r3lite.training.interrupts import Interrupts
from r3lite.training.oversight import Collapse, Oversight
from r3lite.training.run_folder import RunFolder
from r3lite.training.state import TrainState
from r3lite.training.trace import SpanLog

REHEARSED = ("cuda",)  # device types whose allocator may run out of memory in spite of the plan


class Trainer(Protocol):
    """Takes the steps of a run of SFT or RL."""

    state: TrainState
    total: int  # steps of the whole run, over which the learning-rate schedule goes

    def step(self, number: int) -> tuple[dict, int]:
        """Takes step `number` = 1, 2, ...; returns its metrics, and how many tokens it processed.

        The learning rate is set; it may take several optimizer steps.
        """

    def rehearse(self) -> None:
        """Runs the largest forward and backward pass of the run; if memory runs out, its figures are made smaller."""

    def explain_overflow(self) -> str:
        """Which layer's activations overflowed first in the last micro-batch."""


def train(run: RunFolder, trainer: Trainer, oversight: Oversight | None = None, spans: Spans | None = None) -> bool:
    """Takes all steps, or as many as --stop-after says; returns whether the run is complete.

    On a GPU the largest pass is run first, so that a lack of memory shows in the first seconds and not after hours.
    `oversight` validates between steps, and may restore the best checkpoint's weights. `spans`, which the trainer
    records, are written as --track-spans says.
    """
    state, total = trainer.state, trainer.total
    done = run.begin(state)
    last = min(total, done + (run.settings["stop_after"] or total))
    every = run.settings["save_every"]
    log, tracker = metrics.NoLog(), None
    if run.ranks.first:
        if run.settings["track"] != "none":
            from r3lite.training.tracking import build_tracker

            tracker = build_tracker(run.settings, run.output, done)
        log = metrics.MetricsLog(run.output, done, total, run.command, tracker)
    span_log = SpanLog(spans, run.settings, run.output, run.command, done)
    try:
        with Interrupts(state.precision, run.ranks) as interrupts:
            steps = _Steps(run, trainer, oversight, log, interrupts)
            if done < last and state.precision.device.type in REHEARSED:
                with interrupts.step():
                    trainer.rehearse()
            if oversight and (before := oversight.begin(done)):
                log.write(before)
                log.sync()
                run.write(state, 0)
                oversight.saved(0)
                span_log.write(0)
            for number in range(done + 1, last + 1):
                interrupts.leave_if_asked()
                with span_log.step(number):
                    record, must_save = steps.take_with_oversight(number)
                    log.write(record)
                    if interrupts.agree() or must_save or number == last or (every and number % every == 0):
                        with span(spans, "checkpoint"):
                            steps.save(number)
                if oversight:
                    oversight.saved(number)
            interrupts.leave_if_asked()
    except (KeyboardInterrupt, Terminated, R3LiteError, OSError) as error:
        if run.saved_step and not isinstance(error, Collapse):
            print(f"\nsaved step {run.saved_step}; continue with {run.how_to_go_on}", file=sys.stderr)
        raise
    finally:
        log.close()
    if last < total:
        print(f"stopped after step {last} of {total}; continue with {run.how_to_go_on}", file=sys.stderr)
        return False
    run.save(state, total)  # unless it is there: a finished run may be resumed into another folder
    run.finish(state, total)
    return True


@dataclass(frozen=True)
class _Steps:
    """What one step needs, and the step itself."""

    run: RunFolder
    trainer: Trainer
    oversight: Oversight | None
    log: metrics.MetricsLog
    interrupts: Interrupts

    def take_with_oversight(self, number: int) -> tuple[dict, bool]:
        """Takes a step, then validates if it is time; returns the record, and whether a checkpoint must be written."""
        failure = None
        try:
            record = self.take(number)
        except NotFinite as error:
            if not (self.oversight and self.oversight.can_go_back):
                raise
            record, failure = {"step": number}, error
        more, must_save = self.oversight.after(number, record, failure) if self.oversight else ({}, False)
        return record | more, must_save

    def take(self, number: int) -> dict:
        """Takes a step and returns its record.

        A step that fails or is interrupted before it changed a weight is undone, and the state before it is saved.
        """
        trainer, state, settings = self.trainer, self.trainer.state, self.run.settings
        shape = settings["warmup"], settings["min_learning_rate"], settings["learning_rate_schedule"]
        factor = optim.rate(number, trainer.total, *shape)
        scale = self.oversight.guard.rate_scale if self.oversight else 1.0
        optim.set_rate(state.optimizer, factor * scale)
        before, start = state.snapshot(), time.perf_counter()
        self.run.ranks.begin_step(f"{self.run.settings['seed']}/{number}")
        try:
            with self.interrupts.step():
                step_metrics, tokens = trainer.step(number)
        except (KeyboardInterrupt, Terminated, R3LiteError) as error:
            if not state.precision.changed_weights:
                state.rewind(before)
                self.save(number - 1)
            if isinstance(error, NonFiniteGradients) and self.run.ranks.first:  # another rank may have run no row
                raise NonFiniteGradients(f"{error.cause}\n  {trainer.explain_overflow()}", error.remedy) from error
            raise
        seconds = time.perf_counter() - start
        state.num_tokens += tokens
        state.seconds += seconds
        learning_rate = optim.current_rate(state.optimizer)  # --kl-budget may have scaled it within the step
        record = {"step": number, **step_metrics, "learning_rate": learning_rate, "num_tokens": state.num_tokens}
        if state.precision.scaler is not None:
            record["skipped_steps"] = state.precision.skipped
        return record | {
            "step_time": seconds,
            "tokens_per_second": tokens / seconds,
            "peak_memory_mib": metrics.peak_memory_mib(state.precision.device),
        }

    def save(self, number: int) -> None:
        """Writes the checkpoint of a step, after the log: no checkpoint may be newer than it."""
        self.log.sync()
        self.run.save(self.trainer.state, number)
