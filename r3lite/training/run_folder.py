"""A run folder: whether a run may use it, its checkpoints, and what it holds when the run is complete.

Knows no algorithm.
"""

import json
import sys
from pathlib import Path
from typing import Any

from r3lite.config import flat, free_settings, to_toml, with_values
from r3lite.errors import R3LiteError
from r3lite.files import write_json, write_text
from r3lite.training import checkpoint, metrics
from r3lite.training.state import TrainState


class RunFolder:
    """The folder of one run. Constructing it only checks; `begin` writes, once the model and the data are loaded."""

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
                "Name a run folder or a checkpoint; --resume auto starts afresh if there is none.",
            )
        return found

    def _check_settings(self, state: dict) -> None:
        if state["command"] != self.command:
            raise R3LiteError(
                f"{self.source} is a checkpoint of {state['command']}, not of {self.command}",
                "To start from its adapter, pass --adapter instead of --resume.",
            )
        # A setting that did not exist when the run began had the effect of what is now its default.
        defaults, now = json.loads(json.dumps([flat(type(self.config)()), self.settings]))
        then = defaults | state["settings"]
        fixed = (then.keys() | now.keys()) - free_settings(self.config)
        changed = [k for k in sorted(fixed) if then.get(k) != now.get(k)]
        if changed:
            told = ", ".join(f"{k} (was {then.get(k)}, is {now.get(k)})" for k in changed)
            raise R3LiteError(
                f"{self.source} cannot be resumed with other settings: {told}",
                f"Pass --config {self.source.parent / 'config.toml'} for the run's own, or start anew with --adapter.",
            )

    @property
    def how_to_go_on(self) -> str:
        return f"--config {self.output / 'config.toml'} --resume auto"

    def begin(self, state: TrainState) -> int:
        """Puts the checkpoint, if any, into `state` and makes the folder ready; returns the steps already taken."""
        step = self.loaded.step if self.loaded else 0
        if self.loaded:
            state.restore(self.loaded)
        try:
            self.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise R3LiteError(f"the folder {self.output} cannot be made: {error}", "Pass another --output.") from error
        checkpoint.sweep(self.output)
        for later, folder in checkpoint.all_of(self.output).items():
            if later > step:  # unsound, or beyond the checkpoint that the user went back to
                print(f"removing {folder}: the run goes on from step {step}", file=sys.stderr)
                checkpoint.remove(folder)
        # The config to go on with: it names this folder, and not how this process was started.
        whole = with_values(self.config, {"output": str(self.output), "resume": None, "stop_after": None})
        write_text(self.output / "config.toml", to_toml(whole, self.command))
        for log in self.logs:
            metrics.cut((self.source.parent if self.source else self.output) / log, self.output / log, step)
        self.saved_step = 0 if self.elsewhere else step
        self.loaded = None  # its tensors have been copied
        return step

    def save(self, state: TrainState, step: int) -> None:
        """Writes the checkpoint of a step, unless it is there, and removes the oldest ones."""
        if step == self.saved_step:  # step 0 too: a fresh start has nothing to save
            return
        try:
            made = state.checkpoint(step, self.command, self.settings)
            checkpoint.write(self.output, made, state.save_adapter)
        except OSError as error:
            raise R3LiteError(
                f"the checkpoint of step {step} cannot be written in {self.output}: {error}",
                "Make room or mend the folder, then go on with --resume auto.",
            ) from error
        self.saved_step = step
        checkpoint.prune(self.output, self.settings["keep_checkpoints"])

    def finish(self, state: TrainState, total: int) -> None:
        """Writes `adapter/` and `summary.json`."""
        checkpoint.replace_folder(self.output / "adapter", state.save_adapter)
        records = metrics.read(self.output / metrics.FILE)
        numbers: dict[str, list[float]] = {}
        for record in records:
            for key, value in record.items():
                if isinstance(value, (int, float)) and key not in ("step", "epoch", "num_tokens", "learning_rate"):
                    numbers.setdefault(key, []).append(value)
        summary = {
            "command": self.command,
            "steps": total,
            "seconds": round(state.seconds, 3),
            "num_tokens": state.num_tokens,
            "last": records[-1] if records else {},
            "mean": {key: sum(values) / len(values) for key, values in numbers.items()},
            **state.facts,
            "adapter": "adapter",
            "checkpoint": f"checkpoint-{total}",
        }
        write_json(self.output / "summary.json", summary)


def _holds_something(path: Path) -> bool:
    return path.exists() and (not path.is_dir() or any(path.iterdir()))
