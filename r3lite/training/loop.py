"""The training loop: learning rate, steps, log, checkpoints, interruptions.

Knows no algorithm: a `Trainer` takes the steps. A step of SFT is one optimizer step; a step of RL is a round of
rollouts with several optimizer steps.
"""

import sys
import time
from collections.abc import Callable
from typing import Protocol

import torch

from r3lite.core.config import flat
from r3lite.core.errors import NotFinite, R3LiteError
from r3lite.core.exit_status import Terminated
from r3lite.core.spans import NO_SPANS, Spans
from r3lite.devices.precision import NonFiniteGradients
from r3lite.training import metrics, optim
from r3lite.training.interrupts import Interrupts
from r3lite.training.oversight import NO_OVERSIGHT, Collapse, NoOversight, Oversight
from r3lite.training.run_folder import RunFolder
from r3lite.training.state import TrainState
from r3lite.training.trace import open_span_log

REHEARSED = ("cuda",)  # device types whose allocator may run out of memory in spite of the plan


class Trainer(Protocol):
    """Takes the steps of a run of SFT or RL."""

    state: TrainState
    total: int  # steps of the whole run; the learning-rate schedule spans them

    def step(self, number: int) -> tuple[dict, int]:
        """Takes step `number` = 1, 2, ...; returns its metrics, and how many tokens it processed.

        The loop sets the learning rate before each step. In RL a step takes several optimizer steps.
        """

    def rehearse(self) -> None:
        """Runs a pass over the run's longest rows, with gradients; makes the run's passes smaller if memory runs out.

        No weight changes, and the gradients are dropped.
        """

    def explain_overflow(self) -> str:
        """Says which layer's activations overflowed first in the last micro-batch."""


def train(
    run: RunFolder,
    trainer: Trainer,
    oversight: Oversight | NoOversight = NO_OVERSIGHT,
    spans: Spans = NO_SPANS,
) -> bool:
    """Takes all steps, or as many as --stop-after says; returns whether the run is complete.

    On a CUDA card a pass over the longest rows is run first, so that a lack of memory shows in the first seconds and
    not after hours.
    `oversight` validates between steps, and may restore the best checkpoint's weights. The trainer records `spans`, and
    after each step the loop writes them as --track-spans says.
    """
    state = trainer.state
    schedule = run.config.schedule
    done = run.restore_or_start(state)  # loads the checkpoint, if there is one; returns the number of steps taken
    last = _last_step(run, done=done, total=trainer.total)
    log = _open_log(run, done, trainer.total, device=state.precision.device)
    span_log = open_span_log(
        spans,
        tracking=run.config.tracking,
        output=run.output,
        command=run.command,
        done=done,
    )

    def save(number: int) -> None:
        """Writes the log to the disk, then the checkpoint of step `number`: no checkpoint may be newer than the log."""
        log.sync()
        run.save(state, number)

    try:
        # Ctrl-C stops a step at once, or at its end if an update of weights has begun, which `state.precision` knows.
        with Interrupts(state.precision, run.ranks) as interrupts:
            if done < last and state.precision.device.type in REHEARSED:
                with interrupts.step():
                    trainer.rehearse()
            # The record of a validation before the first step; None if there is no such validation.
            record_of_step_0 = oversight.begin(done)
            if record_of_step_0 is not None:
                log.write(record_of_step_0)
                log.sync()
                run.write(state, 0)  # a rollback may need this checkpoint, which `run.save` leaves out
                oversight.end_step(0)
                span_log.write(0)
            for number in range(done + 1, last + 1):
                interrupts.raise_if_interrupted()
                with span_log.step(number):
                    _set_learning_rate(run, trainer, number=number, scale=oversight.rate_scale)
                    failure = None
                    try:
                        record = _take_step(run, trainer, interrupts=interrupts, save=save, number=number)
                    except NotFinite as error:
                        if not oversight.can_go_back:
                            raise
                        record = {"step": number}  # a step that failed has no metrics
                        failure = error
                    # May validate, and may roll back to the best checkpoint.
                    further_metrics, must_save = oversight.after(number, record, failure)
                    log.write(record | further_metrics)
                    interrupted = interrupts.any_rank_interrupted()
                    is_due = schedule.save_every > 0 and number % schedule.save_every == 0
                    if interrupted or must_save or is_due or number == last:
                        with spans.span("checkpoint"):
                            save(number)
                oversight.end_step(number)  # may end the run by raising Collapse
            interrupts.raise_if_interrupted()  # an interruption that had to wait for the end of the last step
    except (KeyboardInterrupt, Terminated, R3LiteError, OSError) as error:
        _say_how_to_go_on(run, error)
        raise
    finally:
        log.close()
    if last < trainer.total:
        print(f"stopped after step {last} of {trainer.total}; continue with: {run.resume_command}", file=sys.stderr)
        return False
    # This writes something only if a finished run was resumed into another folder: then no step was taken, and the
    # folder has no checkpoint yet. In all other cases the last step has been saved before.
    run.save(state, trainer.total)
    run.write_results(state, trainer.total)
    return True


def _last_step(run: RunFolder, done: int, total: int) -> int:
    """Returns the number of the last step that this call is to take, after `done` steps.

    Prints a note if none of the `total` steps is left.
    """
    if done == total:
        print(f"the run has all of its {total} steps; its results are written again", file=sys.stderr)
    stop_after = run.config.schedule.stop_after
    if stop_after is None:
        return total
    return min(total, done + stop_after)


def _say_how_to_go_on(run: RunFolder, error: BaseException) -> None:
    """Prints the command that continues a run which an error or an interruption ends.

    Before the first checkpoint, an interruption prints how to begin again, and an error prints nothing. Nor does a
    Collapse, whose message has its own remedy.
    """
    if run.saved_step is not None and not isinstance(error, Collapse):
        print(f"\nsaved step {run.saved_step}; continue with: {run.resume_command}", file=sys.stderr)
    elif isinstance(error, KeyboardInterrupt | Terminated):
        print(f"\nno checkpoint was written; begin again with: {run.resume_command}", file=sys.stderr)


def _open_log(run: RunFolder, done: int, total: int, device: torch.device) -> metrics.MetricsLog | metrics.NoLog:
    """Returns the log of the run's first rank, with its tracker; the logs of other ranks write nothing."""
    if not run.ranks.first:
        return metrics.NoLog()
    tracker = metrics.NO_TRACKER
    if run.config.tracking.track != "none":
        from r3lite.training.tracking import build_tracker

        tracker = build_tracker(
            run.config.tracking,
            settings=flat(run.config),
            output=run.output,
            done=done,
        )
    return metrics.MetricsLog(
        run.output,
        start=done,
        total=total,
        label=run.command,
        tracker=tracker,
        memory_kind=metrics.memory_kind(device),
    )


def _set_learning_rate(run: RunFolder, trainer: Trainer, number: int, scale: float) -> None:
    """Sets the scheduled learning rate of a step, times `scale`, which rollbacks reduce."""
    settings = run.config.optimizer
    share = optim.rate_share(
        number,
        trainer.total,
        warmup=settings.warmup,
        floor=settings.min_learning_rate,
        schedule=settings.learning_rate_schedule,
    )
    optim.set_rate(trainer.state.optimizer, share * scale)


def _take_step(
    run: RunFolder,
    trainer: Trainer,
    interrupts: Interrupts,
    save: Callable[[int], None],
    number: int,
) -> dict:
    """Takes a step and returns its record.

    A step that ends with KeyboardInterrupt, Terminated or R3LiteError before it changed a weight is undone, and the
    checkpoint of the step before is saved. After any other error, or once a weight has changed, the run can only be
    continued from an earlier checkpoint: by --resume, or after NotFinite by the collapse guard, in this process.
    """
    state = trainer.state
    snapshot = state.snapshot()
    start = time.perf_counter()
    # With several ranks, seeds each rank's dropout for this step. One process needs no seed: checkpoints save the state
    # of its generator.
    run.ranks.begin_step(f"{run.config.common.seed}/{number}")
    try:
        with interrupts.step():
            step_metrics, tokens = trainer.step(number)
    except (KeyboardInterrupt, Terminated, R3LiteError) as error:
        if not state.precision.changed_weights:
            state.rewind(snapshot)
            save(number - 1)
        # Only the first rank explains: another rank may have run no row, and then has no micro-batch to run again.
        if isinstance(error, NonFiniteGradients) and run.ranks.first:
            raise NonFiniteGradients(
                f"{error.cause}\n  {trainer.explain_overflow()}", error.remedy, code=error.code
            ) from error
        raise
    seconds = time.perf_counter() - start
    state.num_tokens += tokens
    state.seconds += seconds
    record = {
        "step": number,
        **step_metrics,
        "learning_rate": optim.current_rate(state.optimizer),  # --kl-budget may have scaled it within the step
        "num_tokens": state.num_tokens,
    }
    if state.precision.scaler is not None:
        record["skipped_steps"] = state.precision.skipped  # so far, because gradients overflowed fp16
    record["step_time"] = seconds
    record["tokens_per_second"] = tokens / seconds
    record["peak_memory_mib"] = metrics.peak_memory_mib(state.precision.device)
    return record
