"""The run around a step: its folder, checkpoints, resuming, interruptions, the log and the summary.

Knows no algorithm: a recipe hands it a function that takes step n. The same loop serves SFT (one optimizer step a
step) and RL (a round of rollouts with several optimizer steps).
"""

import copy
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from r3lite.command import Terminated
from r3lite.config import flat, free_settings, to_toml, with_values
from r3lite.devices.precision import NonFiniteGradients, Precision
from r3lite.errors import R3LiteError
from r3lite.files import write_json, write_text
from r3lite.training import checkpoint, metrics, optim
from r3lite.training.checkpoint import Checkpoint
from r3lite.training.interrupts import Interrupts

Step = Callable[[int], tuple[dict, int]]  # takes step n, from 1; returns its metrics and how many tokens it read


@dataclass
class Training:
    """What a run changes, and what its checkpoints therefore hold."""

    optimizer: torch.optim.AdamW  # made by optim.adamw
    precision: Precision
    max_grad_norm: float
    save_adapter: Callable[[Path], None]  # writes the adapter in PEFT's form into a folder
    kept: dict = field(default_factory=dict)  # what else the recipe must find again when resumed, as JSON
    facts: dict = field(default_factory=dict)  # about the run, for summary.json
    data: str = ""  # fingerprint of what is trained on: a run is resumed on the same data only
    explain: Callable[[], str] | None = None  # says where gradients that are not finite came from
    num_tokens: int = 0  # read so far, padding not counted
    seconds: float = 0.0  # spent in steps so far

    def update(self) -> tuple[float, bool]:
        """One optimizer step with all parameters clipped together; see Precision.step."""
        return self.precision.step(self.optimizer, optim.parameters(self.optimizer).values(), self.max_grad_norm)


class Run:
    """A run folder. Opening it checks what was asked and touches nothing; `begin` does, once all else is loaded."""

    def __init__(self, command: str, config: Any, default_output: str, logs: tuple[str, ...] = ()):
        """`logs` are JSON-lines files with a `step` that the recipe keeps beside metrics.jsonl, cut as it is on resume.

        Raises R3LiteError for a folder of another run, nothing to resume from, or settings that differ."""
        self.command, self.config, self.settings = command, config, flat(config)
        self.logs = (metrics.FILE, *logs)
        resume, output = self.settings["resume"], self.settings["output"]
        self.source = self._checkpoint_to_resume(resume, output)  # None: a fresh start
        came_from = self.source.parent if self.source else None
        self.output = Path(output or came_from or default_output)
        self.elsewhere = bool(came_from) and came_from.resolve() != self.output.resolve()
        self.loaded = checkpoint.read(self.source) if self.source else None
        self.saved_step = 0
        if self.loaded:
            self._check_settings(self.loaded.state)
        if (resume is None or self.elsewhere) and _holds_something(self.output):
            raise R3LiteError(
                f"{self.output} exists and is not an empty folder",
                "Pass --resume auto to go on with the run in it, or another --output.",
            )

    @staticmethod
    def _checkpoint_to_resume(resume: str | None, output: str | None) -> Path | None:
        if resume is None:
            return None
        if resume == "auto":
            if output is None:
                raise R3LiteError("--resume auto looks in --output, and none is named", "Pass --output FOLDER.")
            found = checkpoint.newest_sound(Path(output))
            if found is None and checkpoint.all_of(Path(output)):
                raise R3LiteError(
                    f"no checkpoint in {output} is sound",
                    "Delete its checkpoint folders to start afresh there, or pass another --output.",
                )
            return found
        folder = Path(resume)
        if not folder.is_dir():
            raise R3LiteError(f"--resume {resume}: there is no such folder", "Name a run folder or a checkpoint in it.")
        found = folder if checkpoint.NAME.fullmatch(folder.resolve().name) else checkpoint.newest_sound(folder)
        if found is None:
            raise R3LiteError(
                f"--resume {resume}: there is no sound checkpoint in it",
                "Name a run folder or a checkpoint; --resume auto starts afresh where there is none.",
            )
        return found

    def _check_settings(self, state: dict) -> None:
        if state["command"] != self.command:
            raise R3LiteError(
                f"{self.source} is a checkpoint of {state['command']}, not of {self.command}",
                "To start from its adapter, pass --adapter instead of --resume.",
            )
        then, now = state["settings"], json.loads(json.dumps(self.settings))
        asked = sorted((then.keys() | now.keys()) - free_settings(self.config))
        changed = [k for k in asked if then.get(k) != now.get(k)]
        if changed:
            told = ", ".join(f"{k} (was {then.get(k)}, is {now.get(k)})" for k in changed)
            raise R3LiteError(
                f"{self.source} cannot be resumed with other settings: {told}",
                f"Pass --config {self.source.parent / 'config.toml'} for the run's own, or start anew with --adapter.",
            )

    @property
    def how_to_go_on(self) -> str:
        return f"--config {self.output / 'config.toml'} --resume auto"

    def begin(self, training: Training) -> int:
        """Puts the checkpoint, if any, into `training` and makes the folder ready; returns the steps already taken."""
        step = self.loaded.step if self.loaded else 0
        if self.loaded:
            _restore(training, self.loaded)
        try:
            self.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise R3LiteError(f"the folder {self.output} cannot be made: {error}", "Pass another --output.") from error
        checkpoint.sweep(self.output)
        for later, folder in checkpoint.all_of(self.output).items():
            if later > step:  # unsound, or beyond the checkpoint that the user went back to
                print(f"removing {folder}: the run goes on from step {step}", file=sys.stderr)
                checkpoint.remove(folder)
        # As the user would write it to go on: where the run is, without how this process was started.
        whole = with_values(self.config, {"output": str(self.output), "resume": None, "stop_after": None})
        write_text(self.output / "config.toml", to_toml(whole, self.command))
        for log in self.logs:
            metrics.cut((self.source.parent if self.source else self.output) / log, self.output / log, step)
        self.saved_step = 0 if self.elsewhere else step
        self.loaded = None  # its tensors have been copied
        return step

    def save(self, training: Training, step: int) -> None:
        """Writes the checkpoint of a step, unless it is there, and removes the oldest ones."""
        if step == self.saved_step:  # step 0 too: a fresh start has nothing to save
            return
        state = {
            "step": step,
            "command": self.command,
            "settings": self.settings,
            "precision": training.precision.state_dict(),
            "num_tokens": training.num_tokens,
            "seconds": training.seconds,
            "data": training.data,
            "kept": training.kept,
        }
        tensors = {
            "weights": optim.parameters(training.optimizer),
            "optimizer": optim.state_tensors(training.optimizer),
            "random": checkpoint.random_state(),
        }
        try:
            checkpoint.write(self.output, Checkpoint(step, tensors, state), training.save_adapter)
        except OSError as error:
            raise R3LiteError(
                f"the checkpoint of step {step} cannot be written in {self.output}: {error}",
                "Make room or mend the folder, then go on with --resume auto.",
            ) from error
        self.saved_step = step
        checkpoint.prune(self.output, self.settings["keep_checkpoints"])

    def finish(self, training: Training, total: int) -> None:
        """Writes `adapter/` and `summary.json`."""
        checkpoint.replace_folder(self.output / "adapter", training.save_adapter)
        records = metrics.read(self.output / metrics.FILE)
        numbers: dict[str, list[float]] = {}
        for record in records:
            for key, value in record.items():
                if isinstance(value, (int, float)) and key not in ("step", "epoch", "num_tokens", "learning_rate"):
                    numbers.setdefault(key, []).append(value)
        summary = {
            "command": self.command,
            "steps": total,
            "seconds": round(training.seconds, 3),
            "num_tokens": training.num_tokens,
            "last": records[-1] if records else {},
            "mean": {key: sum(values) / len(values) for key, values in numbers.items()},
            **training.facts,
            "adapter": "adapter",
            "checkpoint": f"checkpoint-{total}",
        }
        write_json(self.output / "summary.json", summary)


def _holds_something(path: Path) -> bool:
    return path.exists() and (not path.is_dir() or any(path.iterdir()))


def _restore(training: Training, loaded: Checkpoint) -> None:
    training.precision.load_state_dict(loaded.state["precision"])
    parameters, weights = optim.parameters(training.optimizer), loaded.tensors["weights"]
    ours, theirs = ({name: tuple(t.shape) for name, t in x.items()} for x in (parameters, weights))
    wrong = {name for name, _ in ours.items() ^ theirs.items()}
    if wrong:
        raise R3LiteError(
            f"the checkpoint holds other weights than this run trains: {len(wrong)} differ, such as {min(wrong)}",
            "Resume with the --model, --adapter and LoRA settings that the run was started with.",
        )
    if loaded.state["data"] != training.data:
        raise R3LiteError(
            "the data are not those that the run was started with",
            "Resume with the first run's --data, tokenizer and prompts, or start anew from its adapter with --adapter.",
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    optim.load_state_tensors(training.optimizer, loaded.tensors["optimizer"])
    checkpoint.set_random_state(loaded.tensors["random"])
    training.kept = loaded.state["kept"]
    training.num_tokens, training.seconds = loaded.state["num_tokens"], loaded.state["seconds"]


def train(run: Run, training: Training, total: int, step: Step) -> bool:
    """Takes steps up to `total`, or as many as --stop-after says; returns whether the run is complete.

    A step may call `training.update` any number of times; the learning rate is set before it, by the schedule over
    `total`.
    """
    done = run.begin(training)
    last = min(total, done + (run.settings["stop_after"] or total))
    every = run.settings["save_every"]
    log = metrics.MetricsLog(run.output, done, total, run.command)
    try:
        with Interrupts(training.precision) as interrupts:
            for number in range(done + 1, last + 1):
                record = _step_or_save(run, training, number, total, step, interrupts, log)
                log.write(record)
                if number == last or interrupts.pending or (every and number % every == 0):
                    _save(run, training, number, log)
                interrupts.leave_if_asked()
    except (KeyboardInterrupt, Terminated, R3LiteError):
        if run.saved_step:
            print(f"\nstep {run.saved_step} is saved; go on with {run.how_to_go_on}", file=sys.stderr)
        raise
    finally:
        log.close()
    if last < total:
        print(f"stopped after step {last} of {total}; go on with {run.how_to_go_on}", file=sys.stderr)
        return False
    run.save(training, total)  # where it is not there: a finished run resumed into another folder
    run.finish(training, total)
    return True


def _save(run: Run, training: Training, step: int, log: metrics.MetricsLog) -> None:
    log.sync()
    run.save(training, step)


def _step_or_save(
    run: Run,
    training: Training,
    number: int,
    total: int,
    step: Step,
    interrupts: Interrupts,
    log: metrics.MetricsLog,
) -> dict:
    """Takes a step. One that ends early, before it changed a weight, has not been: the step before is saved."""
    random, kept = checkpoint.random_state(), copy.deepcopy(training.kept)
    tokens, seconds = training.num_tokens, training.seconds
    try:
        with interrupts.step():
            return _timed_step(training, number, run.settings, total, step)
    except (KeyboardInterrupt, Terminated, R3LiteError):
        if not training.precision.changed_weights:
            checkpoint.set_random_state(random)
            training.kept, training.num_tokens, training.seconds = kept, tokens, seconds
            _save(run, training, number - 1, log)
        raise


def _timed_step(training: Training, number: int, settings: dict, total: int, step: Step) -> dict:
    """Takes one step and makes its record."""
    share = optim.rate(number, total, settings["warmup"], settings["min_learning_rate"])
    learning_rate = optim.set_rate(training.optimizer, share)
    start = time.perf_counter()
    try:
        measured, tokens = step(number)
    except NonFiniteGradients as error:
        if training.explain is None:
            raise
        raise NonFiniteGradients(f"{error.cause}\n  {training.explain()}", error.remedy) from error
    seconds = time.perf_counter() - start
    training.num_tokens += tokens
    training.seconds += seconds
    record = {"step": number, **measured, "learning_rate": learning_rate, "num_tokens": training.num_tokens}
    if training.precision.scaler is not None:
        record["skipped_steps"] = training.precision.skipped
    return record | {
        "step_time": seconds,
        "tokens_per_second": tokens / seconds,
        "peak_memory_mib": metrics.peak_memory_mib(training.precision.device),
    }
