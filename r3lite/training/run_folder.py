"""A run folder: whether a run may use it, its checkpoints, and what it holds when the run is complete.

Knows no algorithm.
"""

import contextlib
import shutil
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError

from r3lite.core import run_files
from r3lite.core.config import flat
from r3lite.core.earlier_output import changes, refuse_another_run
from r3lite.core.errors import R3LiteError, explained
from r3lite.core.files import (
    folder_fingerprint,
    load_toml,
    names_in,
    similar_path,
    sole_writer,
    sweep,
    write_json,
    write_jsonl,
    write_text,
)
from r3lite.core.inherited import ADAPTER, CHECKPOINT, folders_by_step
from r3lite.core.invocation import to_toml, with_values
from r3lite.core.processes import torchrun_world
from r3lite.devices.ranks import ALONE, Ranks
from r3lite.models.weights import resolve_folder
from r3lite.settings import Common, ModelSettings, OptimizerSettings, Schedule, TrackSettings
from r3lite.training import checkpoint, metrics
from r3lite.training.state import TrainState

# A scheduler, or a shell with `> log.txt`, may put files with these endings into the folder before the run begins.
LOGS_OF_SHELLS = (".log", ".txt", ".out", ".err")
NOT_AVERAGED = ("step", "epoch", "num_tokens", "learning_rate")  # metrics whose means are not in summary.json


class RunConfig(Protocol):
    """The sections of settings that every training run has."""

    common: Common
    model: ModelSettings
    schedule: Schedule
    optimizer: OptimizerSettings
    tracking: TrackSettings


@dataclass(frozen=True)
class _Origin:
    """The folder that a run writes to, and the checkpoint that the run goes on from."""

    output: Path
    from_other_folder: bool  # True if the checkpoint is in another run's folder
    source: Path | None  # the folder of the checkpoint; None: a new run
    loaded: checkpoint.Checkpoint | None  # what that folder holds


class RunFolder:
    """The folder of one run, which no other process may write to until the context of this object ends.

    Constructing it only locks and checks the folder; `restore_or_start` writes, once the model and the data are loaded.
    Of several ranks, only the first one reads and writes the folder, and sends the others what it has read.
    """

    def __init__(
        self,
        command: str,
        config: RunConfig,
        default: str,
        logs: tuple[str, ...] = (),
        ranks: Ranks = ALONE,
    ):
        """Opens the folder that --output names; without it, the run folder that --resume names, or else `default`.

        `logs` are further JSON-lines files of the command, whose lines have a `step`. On resume they are cut after the
        checkpoint's step, as metrics.jsonl is.
        Raises R3LiteError for a folder of another run, nothing to resume from, or settings that differ.
        """
        self.command = command
        self.config = config
        self.logs = (run_files.METRICS, *logs)
        self.ranks = ranks
        self.saved_step: int | None = None  # the step of the newest checkpoint in this folder; None if there is none
        self.best: int | None = None  # the step of the best checkpoint, which is never pruned
        self.base: str | None = None  # fingerprint of the base model; `restore_or_start` sets it
        self.further_files: dict[str, Any] = {}  # content of further JSON files, by name; written when the run begins
        self._lock = contextlib.ExitStack()
        origin = ranks.from_first(lambda: self._open(default))
        self.output = origin.output
        self.from_other_folder = origin.from_other_folder
        self.source = origin.source
        self.loaded = origin.loaded

    def _open(self, default: str) -> _Origin:
        """Locks the folder, and reads the checkpoint that the run goes on from."""
        resume = self.config.schedule.resume
        output = self.config.common.output
        came_from = _folder_to_resume(resume, output)  # None: a fresh start
        self.output = Path(output or came_from or default)
        from_other_folder = came_from is not None and came_from.resolve() != self.output.resolve()
        with contextlib.ExitStack() as lock:
            lock.enter_context(sole_writer(self.output))
            source = _checkpoint_to_resume(resume, came_from)
            loaded = None
            if source is not None:
                loaded = checkpoint.read(source)
                self._check_settings(loaded.state, source)
            if loaded is None or from_other_folder:
                self._check_free(resume)
            if source is not None:
                print(f"continuing from {source}", file=sys.stderr)
            elif resume:
                print(f"{self.output} has no checkpoint to resume: a new run begins", file=sys.stderr)
            self._lock = lock.pop_all()
        return _Origin(self.output, from_other_folder, source, loaded)

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *exception) -> None:
        self._lock.close()

    def _check_settings(self, state: dict, source: Path) -> None:
        """Raises R3LiteError if the state of the checkpoint `source` is of another command or has other settings."""
        if state["command"] != self.command:
            cause = f"{source} is a checkpoint of {state['command']}, not of {self.command}"
            raise R3LiteError(
                cause,
                "To start from its adapter, pass --adapter instead of --resume.",
                code="checkpoint-of-other-command",
            )
        changed = changes(state["settings"], self.config)
        if changed:
            remedy = f"Pass --config {source.parent / run_files.CONFIG}, or start a new run with --adapter."
            raise R3LiteError(
                f"{source} cannot be resumed with other settings: {changed}", remedy, code="resume-settings-differ"
            )

    def _check_free(self, resume: str | None) -> None:
        """Raises R3LiteError if a run may not start in the folder because the folder is not empty.

        With --resume auto, it may hold what this run left before its first checkpoint, or logs of a shell.
        """
        names = names_in(self.output)
        if resume == "auto" and run_files.CONFIG in names:
            refuse_another_run(self.output / run_files.CONFIG, self.command, config=self.config, output=self.output)
            return
        only_logs = all(name.endswith(LOGS_OF_SHELLS) for name in names)
        if names and not (resume == "auto" and only_logs):
            remedy = "It is not the folder of a run that can be continued: pass another --output."
            if run_files.CONFIG in names and self.command in load_toml(self.output / run_files.CONFIG):
                remedy = "Pass --resume auto to continue the run in it, or another --output."
            raise R3LiteError(
                f"{self.output} exists and is not an empty folder: it holds {min(names)}",
                remedy,
                code="output-not-empty",
            )

    @property
    def resume_command(self) -> str:
        """The command that continues this run."""
        start = "torchrun ... -m" if self.ranks.size > 1 else "python -m"
        config_file = str(self.output / run_files.CONFIG)
        if " " in config_file:
            config_file = f'"{config_file}"'
        return f"{start} r3lite.{self.command} --config {config_file} --resume auto"

    def restore_or_start(self, state: TrainState) -> int:
        """Loads the checkpoint, if there is one, into `state`, and makes the folder ready.

        Sets `base`. Returns the number of steps taken so far. Raises R3LiteError if the base model has changed since.
        """
        self.base = folder_fingerprint(resolve_folder(self.config.model.model))
        if self.ranks.size > 1:
            weights = state.weights_fingerprint()
            self.ranks.require_same({"the data": state.data, "the base model": self.base, "the weights": weights})
        step = self.loaded.step if self.loaded else 0
        came_from = self.source.parent if self.source else self.output
        # Broken logs are refused before anything is changed.
        logs = {}
        if self.ranks.first:
            last_logged = step if self.loaded else -1  # a fresh start drops even the validation before step 1
            logs = {name: metrics.read_up_to(came_from / name, last_logged) for name in self.logs}
        if self.loaded:
            self._restore(state, self.loaded)
        if self.ranks.first:
            self._make_ready(step, logs)
        if self.loaded and not self.from_other_folder:
            self.saved_step = step
        self.loaded = None  # its tensors have been copied
        return step

    def _make_ready(self, step: int, logs: dict[str, list[dict]]) -> None:
        """Removes checkpoints after `step`. Writes the config, `further_files`, and `logs`, which end at this step."""
        sweep(self.output)
        for checkpoint_step, folder in folders_by_step(self.output).items():
            if checkpoint_step > step:  # damaged, or later than the checkpoint that the user named
                print(f"removing {folder}: the run continues from step {step}", file=sys.stderr)
                checkpoint.remove(folder)
                (self.output / run_files.SUMMARY).unlink(missing_ok=True)  # else a report takes the run for complete
        # The config with which `--resume auto` goes on: it names this folder, but not how this process was started.
        config = with_values(self.config, {"output": str(self.output), "resume": None, "stop_after": None})
        write_text(self.output / run_files.CONFIG, to_toml(config, self.command))
        for name, value in self.further_files.items():
            write_json(self.output / name, value)
        for name, records in logs.items():
            write_jsonl(self.output / name, records)

    def _restore(self, state: TrainState, loaded: checkpoint.Checkpoint) -> None:
        """Loads a checkpoint into `state`; raises R3LiteError if it is of another base model."""
        base = loaded.state.get("base")  # None: written by a version that did not store it
        if base is not None and base != self.base:
            cause = f"the files of the base model {self.config.model.model} have changed since the run started"
            raise R3LiteError(cause, "Restore them, or start a new run with --adapter.", code="base-changed")
        state.restore(loaded)
        changed = state.differences(loaded.state["kept"])
        if changed:
            message = f"warning: the memory settings are not those of the checkpoint ({', '.join(changed)})"
            print(f"{message}: results differ by rounding from an uninterrupted run", file=sys.stderr)

    def save(self, state: TrainState, step: int) -> None:
        """Writes the checkpoint of a step, unless it is there. Step 0 gets none: a new run begins there anyway."""
        if step not in (0, self.saved_step):
            self.write(state, step)

    def write(self, state: TrainState, step: int) -> None:
        """Writes the checkpoint of a step, even if there is one, and removes the oldest checkpoints."""
        if self.ranks.first:
            with self._write_errors(f"the checkpoint of step {step}"):
                run = {"command": self.command, "settings": flat(self.config), "base": self.base}
                save_adapter = state.save_adapter if state.result == ADAPTER else None
                checkpoint.write(self.output, state.checkpoint(step, run), save_adapter)
            checkpoint.prune(self.output, self.config.schedule.keep_checkpoints, self.best)
        self.saved_step = step

    def keep_best(self, step: int) -> bool:
        """Makes the checkpoint of a step the best one, which is never pruned; returns False if it does not exist.

        If it is only in the folder that the run came from, it is copied.
        """
        exists = self.ranks.from_first(lambda: self._fetch(step))
        self.best = step if exists else None
        return exists

    def _fetch(self, step: int) -> bool:
        """Copies the checkpoint of a step from the folder that the run came from, unless this folder has it.

        Returns whether this folder has it now.
        """
        folder = self.output / f"checkpoint-{step}"
        source = self.source.parent / folder.name if self.source else folder
        if not folder.exists() and source.exists():
            with self._write_errors(f"the checkpoint of step {step}"):
                checkpoint.replace_folder(folder, partial(shutil.copytree, source, dirs_exist_ok=True))
        return folder.exists()

    def _write_errors(self, file: str) -> contextlib.AbstractContextManager:
        """Raises R3LiteError in place of the errors of writing `file`."""
        remedy = "Check the disk space and the folder, then continue with --resume auto."
        return explained(
            (OSError, SafetensorError), f"{file} cannot be written in {self.output}", remedy, code="run-unwritable"
        )

    def write_adapter(self, state: TrainState, step: int | None) -> None:
        """Writes `adapter/`, or `model/`, from the checkpoint of a step; from the current weights if `step` is None."""
        if not self.ranks.first:
            return
        if step is None:
            fill = state.save_adapter
        else:
            source = self.output / f"checkpoint-{step}" / ADAPTER
            fill = partial(shutil.copytree, source, dirs_exist_ok=True)
        with self._write_errors(f"the {state.result}"):
            checkpoint.replace_folder(self.output / state.result, fill)

    def write_results(self, state: TrainState, total: int) -> None:
        """Writes `summary.json`, and `adapter/` or `model/` from the best checkpoint, else from the current weights."""
        if not self.ranks.first:
            return
        self.write_adapter(state, self.best)
        records = metrics.read(self.output / run_files.METRICS)
        summary = {
            "command": self.command,
            "steps": total,
            "seconds": round(state.seconds, 3),
            "num_tokens": state.num_tokens,
            "last": records[-1] if records else {},
            "mean": _means(records),
            **state.facts,
            state.result: state.result,
            f"{state.result}_step": total if self.best is None else self.best,
            "checkpoint": f"checkpoint-{total}",
        }
        with self._write_errors("the summary"):
            write_json(self.output / run_files.SUMMARY, summary)


def check_folder(command: str, config: RunConfig) -> None:
    """Raises R3LiteError if a run may not use the folder that it names. For a dry run: the folder stays as it is.

    Of several processes, only the first one checks.
    """
    if torchrun_world().rank or not (config.common.output or config.schedule.resume):
        return
    with RunFolder(command, config, default=""):
        pass


def _means(records: list[dict]) -> dict[str, float]:
    """The mean of each metric over the steps that have it."""
    numbers: dict[str, list[float]] = {}
    for record in records:
        for key, value in record.items():
            if isinstance(value, (int, float)) and key not in NOT_AVERAGED:
                numbers.setdefault(key, []).append(value)
    return {key: sum(values) / len(values) for key, values in numbers.items()}


def _is_checkpoint(folder: Path) -> bool:
    return CHECKPOINT.fullmatch(folder.resolve().name) is not None


def _folder_to_resume(resume: str | None, output: str | None) -> Path | None:
    """Returns the run folder that --resume names; None if it names none."""
    if resume is None:
        return None
    if resume == "auto":
        if output is None:
            raise R3LiteError(
                "--resume auto needs the run folder", "Pass --output FOLDER.", code="resume-without-output"
            )
        return Path(output)
    folder = Path(resume)
    if not folder.is_dir():
        cause = f"--resume {resume}: no such folder{similar_path(folder)}"
        raise R3LiteError(cause, "Pass a run folder or a checkpoint in it.", code="resume-absent")
    if not _is_checkpoint(folder):
        return folder
    if folder.is_symlink() or not CHECKPOINT.fullmatch(folder.name):  # a link to a checkpoint, or a path such as `.`
        return folder.resolve().parent
    return folder.parent


def _checkpoint_to_resume(resume: str | None, run: Path | None) -> Path | None:
    """Returns the checkpoint that --resume names, or the latest valid one of the run folder; None: a new run."""
    if run is None:
        return None
    if _is_checkpoint(Path(resume)):
        return Path(resume)
    newest = checkpoint.newest_valid(run)
    if newest is None and (resume != "auto" or folders_by_step(run)):
        remedy = "Pass another run folder or checkpoint, or start a new run with another --output."
        raise R3LiteError(f"{run} has no valid checkpoint", remedy, code="no-valid-checkpoint")
    return newest
