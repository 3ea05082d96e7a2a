"""A run folder: whether a run may use it, its checkpoints, and what it holds when the run is complete.

Knows no algorithm.
"""

import contextlib
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from r3lite.core.command import changes, refuse_another_run
from r3lite.core.config import flat
from r3lite.core.errors import R3LiteError, explained
from r3lite.core.files import folder_fingerprint, names_in, sole_writer, sweep, write_json, write_jsonl, write_text
from r3lite.core.invocation import to_toml, with_values
from r3lite.devices.ranks import ALONE, Ranks
from r3lite.models.weights import resolve_folder
from r3lite.training import checkpoint, metrics
from r3lite.training.state import TrainState

CONFIG = "config.toml"
LOGS_OF_SHELLS = (".log", ".txt", ".out", ".err")  # what a scheduler or `> log.txt` may have put there before the run


class RunFolder:
    """The folder of one run, which no other process may write to until the context of this object ends.

    Constructing it only checks; `begin` writes, once the model and the data are loaded. Of several ranks the first one
    alone reads and writes it, and sends the others what it holds.
    """

    def __init__(self, command: str, config: Any, default: str, logs: tuple[str, ...] = (), ranks: Ranks = ALONE):
        """`logs` are JSON-lines files with a `step` that the recipe keeps beside metrics.jsonl, cut as it is on resume;
        `default` is the folder if none is named.

        Raises R3LiteError for a folder of another run, nothing to resume from, or settings that differ."""
        self.command, self.config, self.settings = command, config, flat(config)
        self.logs, self.ranks = (metrics.FILE, *logs), ranks
        self.saved_step = 0
        self.best: int | None = None  # step of a checkpoint that stays, however old it is
        self.base: str | None = None  # fingerprint of the base model, known once that is loaded
        self.notes: dict[str, Any] = {}  # further JSON files by name, which are written when the run begins
        self._held = contextlib.ExitStack()
        opened = ranks.shared(lambda: self._opened(default))
        self.output, self.elsewhere, self.source, self.loaded = opened

    def _opened(self, default: str) -> tuple[Path, bool, Path | None, checkpoint.Checkpoint | None]:
        """The folder, whether the run came from another one, and the checkpoint that it goes on from."""
        resume, output = self.settings["resume"], self.settings["output"]
        came_from = _folder_to_resume(resume, output)  # None: a fresh start
        self.output = Path(output or came_from or default)
        elsewhere = bool(came_from) and came_from.resolve() != self.output.resolve()
        with contextlib.ExitStack() as held:
            held.enter_context(sole_writer(self.output))
            self.source = _checkpoint_to_resume(resume, came_from)
            loaded = checkpoint.read(self.source) if self.source else None
            if loaded:
                self._check_settings(loaded.state)
            if loaded is None or elsewhere:
                self._check_free(resume)
            self._held = held.pop_all()
        return self.output, elsewhere, self.source, loaded

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *exception) -> None:
        self._held.close()

    def _check_settings(self, state: dict) -> None:
        if state["command"] != self.command:
            cause = f"{self.source} is a checkpoint of {state['command']}, not of {self.command}"
            raise R3LiteError(cause, "To start from its adapter, pass --adapter instead of --resume.")
        if changed := changes(state["settings"], self.config):
            remedy = f"Pass --config {self.source.parent / CONFIG}, or start a new run with --adapter."
            raise R3LiteError(f"{self.source} cannot be resumed with other settings: {changed}", remedy)

    def _check_free(self, resume: str | None) -> None:
        """Refuses a fresh start in a folder that holds something else than a run of this one without a checkpoint."""
        names = names_in(self.output)
        if resume == "auto" and CONFIG in names:
            refuse_another_run(self.output / CONFIG, self.command, self.config, self.output)
        elif names and not (resume == "auto" and all(name.endswith(LOGS_OF_SHELLS) for name in names)):
            remedy = "Pass --resume auto to continue the run in it, or another --output."
            raise R3LiteError(f"{self.output} exists and is not an empty folder: it holds {min(names)}", remedy)

    @property
    def how_to_go_on(self) -> str:
        return f"--config {self.output / 'config.toml'} --resume auto"

    def begin(self, state: TrainState) -> int:
        """Puts the checkpoint, if any, into `state` and makes the folder ready; returns the steps already taken."""
        model = self.settings.get("model")
        self.base = folder_fingerprint(resolve_folder(model)) if model else None
        if self.ranks.size > 1:
            weights = state.weights_fingerprint()
            self.ranks.require_same({"the data": state.data, "the base model": self.base, "the weights": weights})
        step = self.loaded.step if self.loaded else 0
        came_from = self.source.parent if self.source else self.output
        # Refused before anything is changed. (A fresh start keeps nothing, not even what was measured before step 1.)
        kept = step if self.loaded else -1
        logs = {log: metrics.up_to(came_from / log, kept) for log in self.logs if self.ranks.first}
        if self.loaded:
            self._restore(state, self.loaded)
        if self.ranks.first:
            self._make_ready(step, logs)
        self.saved_step = 0 if self.elsewhere else step
        self.loaded = None  # its tensors have been copied
        return step

    def _make_ready(self, step: int, logs: dict[str, list[dict]]) -> None:
        """Removes what is later than a step, and writes the config and the logs up to there."""
        sweep(self.output)
        for later, folder in checkpoint.all_of(self.output).items():
            if later > step:  # unsound, or beyond the checkpoint that the user went back to
                print(f"removing {folder}: the run continues from step {step}", file=sys.stderr)
                checkpoint.remove(folder)
        # The config to go on with: it names this folder, and not how this process was started.
        whole = with_values(self.config, {"output": str(self.output), "resume": None, "stop_after": None})
        write_text(self.output / CONFIG, to_toml(whole, self.command))
        for name, value in self.notes.items():
            write_json(self.output / name, value)
        for log, records in logs.items():
            write_jsonl(self.output / log, records)

    def _restore(self, state: TrainState, loaded: checkpoint.Checkpoint) -> None:
        base = loaded.state.get("base")  # None: of a version that did not keep it
        if base is not None and base != self.base:
            cause = f"the files of the base model {self.settings['model']} have changed since the run started"
            raise R3LiteError(cause, "Restore them, or start a new run with --adapter.")
        state.restore(loaded)
        if changed := state.differences(loaded.state["kept"]):
            message = f"warning: the memory settings are not those of the checkpoint ({', '.join(changed)})"
            print(f"{message}: results differ by rounding from an uninterrupted run", file=sys.stderr)

    def save(self, state: TrainState, step: int) -> None:
        """Writes the checkpoint of a step, unless it is there."""
        if step != self.saved_step:  # nor is there anything to save at a fresh start, which is step 0
            self.write(state, step)

    def write(self, state: TrainState, step: int) -> None:
        """Writes the checkpoint of a step in any case, and removes the oldest ones."""
        if self.ranks.first:
            with self._writing(f"the checkpoint of step {step}"):
                run = {"command": self.command, "settings": self.settings, "base": self.base}
                save_adapter = state.save_adapter if state.result == checkpoint.ADAPTER else None
                checkpoint.write(self.output, state.checkpoint(step, run), save_adapter)
            checkpoint.prune(self.output, self.settings["keep_checkpoints"], self.best)
        self.saved_step = step

    def keep(self, step: int) -> bool:
        """Keeps the checkpoint of a step from now on; whether it is there, here or where the run came from."""
        self.best = step if self.ranks.shared(lambda: self._kept(step)) else None
        return self.best is not None

    def _kept(self, step: int) -> bool:
        folder = self.output / f"checkpoint-{step}"
        source = self.source.parent / folder.name if self.source else folder
        if not folder.exists() and source.exists():
            with self._writing(f"the checkpoint of step {step}"):
                checkpoint.replace_folder(folder, partial(shutil.copytree, source, dirs_exist_ok=True))
        return folder.exists()

    def _writing(self, what: str) -> contextlib.AbstractContextManager:
        remedy = "Check the disk space and the folder, then continue with --resume auto."
        return explained((OSError, SafetensorError), f"{what} cannot be written in {self.output}", remedy)

    def write_adapter(self, state: TrainState, step: int | None) -> None:
        """Writes `adapter/`: that of the checkpoint of a step, or with None that of now; or `model/`."""
        if not self.ranks.first:
            return
        source = self.output / f"checkpoint-{step}" / checkpoint.ADAPTER
        fill = state.save_adapter if step is None else partial(shutil.copytree, source, dirs_exist_ok=True)
        with self._writing(f"the {state.result}"):
            checkpoint.replace_folder(self.output / state.result, fill)

    def finish(self, state: TrainState, total: int) -> None:
        """Writes `adapter/`, which is the best one if one is kept as that, or `model/`, and `summary.json`."""
        if not self.ranks.first:
            return
        self.write_adapter(state, self.best)
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
            state.result: state.result,
            f"{state.result}_step": total if self.best is None else self.best,
            "checkpoint": f"checkpoint-{total}",
        }
        with self._writing("the summary"):
            write_json(self.output / "summary.json", summary)


def _is_checkpoint(folder: Path) -> bool:
    return checkpoint.NAME.fullmatch(folder.resolve().name) is not None


def _folder_to_resume(resume: str | None, output: str | None) -> Path | None:
    """The run folder that --resume names; None if it names none."""
    if resume is None:
        return None
    if resume == "auto":
        if output is None:
            raise R3LiteError("--resume auto needs the run folder", "Pass --output FOLDER.")
        return Path(output)
    folder = Path(resume)
    if not folder.is_dir():
        raise R3LiteError(f"--resume {resume}: no such folder", "Pass a run folder or a checkpoint in it.")
    return folder.parent if _is_checkpoint(folder) else folder


def _checkpoint_to_resume(resume: str | None, run: Path | None) -> Path | None:
    """The checkpoint that --resume names, or the latest valid one of the run folder; None: a new run."""
    if run is None:
        return None
    if _is_checkpoint(Path(resume)):
        return Path(resume)
    found = checkpoint.newest_valid(run)
    if found is None and (resume != "auto" or checkpoint.all_of(run)):
        remedy = "Pass another run folder or checkpoint, or start a new run with another --output."
        raise R3LiteError(f"{run} has no valid checkpoint", remedy)
    return found
