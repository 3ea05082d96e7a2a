"""The loop around a step: schedule, log, checkpoints, interruptions.

Knows no algorithm: a recipe hands it a trainer whose `step(n)` does the work. The same loop serves SFT (one optimizer
step a step) and RL (a round of rollouts with several optimizer steps).
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

REHEARSED = ("cuda",)  # kinds of devices whose memory may not be there when it is asked for


class Trainer(Protocol):
    """What a recipe hands to `train`."""

    state: TrainState
    total: int  # steps of the whole run; the learning-rate schedule spans them

    def step(self, number: int) -> tuple[dict, int]:
        """Takes step `number`, counted from 1; its metrics, and how many tokens it processed.

        It may call `state.update` any number of times; the learning rate is set before it.
        """
        ...

    def rehearse(self) -> None:
        """Does the largest pass of the run, and leaves no trace but the smaller figures with which it fits."""
        ...

    def explain_overflow(self) -> str:
        """Where the activations of the step that failed last overflowed."""
        ...


def train(run: RunFolder, trainer: Trainer, oversight: Oversight | None = None, spans: Spans | None = None) -> bool:
    """Takes all steps, or as many as --stop-after says; returns whether the run is complete.

    On a card the largest pass is rehearsed before: what does not fit fails in the first seconds and not hours later.

    `oversight` validates between steps, and may change weights and learning rates there. What the trainer records in
    `spans` is written as --track-spans says.
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
                    record, must_save = steps.take_overseen(number)
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
    """Takes the steps of a run one by one."""

    run: RunFolder
    trainer: Trainer
    oversight: Oversight | None
    log: metrics.MetricsLog
    interrupts: Interrupts

    def take_overseen(self, number: int) -> tuple[dict, bool]:
        """Takes one step and looks after it: its record, and whether a checkpoint must be written."""
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
        """Takes one step and makes its record.

        A step that ends early, before it changed a weight, counts as not taken: the state before it is saved.
        """
        trainer, state, settings = self.trainer, self.trainer.state, self.run.settings
        shape = settings["warmup"], settings["min_learning_rate"], settings["learning_rate_schedule"]
        share = optim.rate(number, trainer.total, *shape)
        scale = self.oversight.guard.rate_scale if self.oversight else 1.0
        learning_rate = optim.set_rate(state.optimizer, share * scale)
        before, start = state.snapshot(), time.perf_counter()
        self.run.ranks.begin_step(f"{self.run.settings['seed']}/{number}")
        try:
            with self.interrupts.step():
                measured, tokens = trainer.step(number)
        except (KeyboardInterrupt, Terminated, R3LiteError) as error:
            if not state.precision.changed_weights:
                state.rewind(before)
                self.save(number - 1)
            if isinstance(error, NonFiniteGradients) and self.run.ranks.first:  # others may have had no row
                raise NonFiniteGradients(f"{error.cause}\n  {trainer.explain_overflow()}", error.remedy) from error
            raise
        seconds = time.perf_counter() - start
        state.num_tokens += tokens
        state.seconds += seconds
        record = {"step": number, **measured, "learning_rate": learning_rate, "num_tokens": state.num_tokens}
        if state.precision.scaler is not None:
            record["skipped_steps"] = state.precision.skipped
        return record | {
            "step_time": seconds,
            "tokens_per_second": tokens / seconds,
            "peak_memory_mib": metrics.peak_memory_mib(state.precision.device),
        }

    def save(self, number: int) -> None:
        """Writes the checkpoint of a step, which is not newer than the log."""
        self.log.sync()
        self.run.save(self.trainer.state, number)
