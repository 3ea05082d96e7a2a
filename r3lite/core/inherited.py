"""What a user need not repeat: settings that are taken from the index that is searched and from the run of the adapter.

Each of these settings is marked where it is defined (Trait.OF_INDEX, Trait.OF_RUN). What the user has set wins.
"""

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r3lite.core import run_files
from r3lite.core.config import Trait, flag, flat, input_path, kinds_of, name_and_path, sections
from r3lite.core.errors import R3LiteError, UsageError
from r3lite.core.files import load_toml, read_record
from r3lite.core.inputs import exists_or_shipped

ADAPTER = "adapter"  # in the folder of a run, or of a checkpoint in it
MODEL = "model"  # the same, of a run that trains all weights
ADAPTER_CONFIG = "adapter_config.json"  # in the folder of an adapter
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
MANIFEST = "manifest.json"  # in the folder of an index
RUNS_SHOWN = 8  # in the error for a folder that has runs in it, but no adapter
VECTOR_RETRIEVERS = ("semantic", "hybrid")  # of --retriever: they search with the encoder of an index


@dataclass(frozen=True)
class InheritedSetting:
    """A setting's value in a file of an index or a run, and the index or the adapters that it comes from."""

    value: Any
    place: str


def run_and_step(adapter: str | Path) -> tuple[Path, int | None]:
    """Returns the run folder that an adapter or model lies in, and the step of its checkpoint if it is in one."""
    folder = Path(adapter).resolve()
    if folder.name in (ADAPTER, MODEL):
        folder = folder.parent
    name = CHECKPOINT.fullmatch(folder.name)
    if name is None:
        return folder, None
    return folder.parent, int(name[1])


def folders_by_step(output: Path) -> dict[int, Path]:
    """Returns the checkpoints in a run folder by step, oldest first, valid or not."""
    by_step = {}
    for path in output.glob("checkpoint-*"):
        name = CHECKPOINT.fullmatch(path.name)
        if name and path.is_dir():
            by_step[int(name[1])] = path
    return dict(sorted(by_step.items()))


def adapter_folder(folder: str | Path) -> Path:
    """Returns the folder that has the files of an adapter.

    It is the folder itself, or the `adapter/` of a run folder or, if the run was interrupted, of its newest checkpoint.
    """
    folder = Path(folder)
    newest_first = [checkpoint / ADAPTER for checkpoint in reversed(folders_by_step(folder).values())]
    for candidate in (folder, folder / ADAPTER, *newest_first):
        if (candidate / ADAPTER_CONFIG).is_file():
            return candidate
    return folder


def adapter_fault(path: str) -> str:
    """Returns what an error says after the name of a folder without an adapter; "" if it has an adapter or a model.

    The text names the runs in the folder that have an adapter.
    """
    folder = Path(path)
    files = (adapter_folder(folder) / ADAPTER_CONFIG, folder / "config.json", folder / MODEL / "config.json")
    if any(file.is_file() for file in files):
        return ""
    runs = sorted({*folder.glob(f"*/{ADAPTER}"), *folder.glob(f"*/*/{ADAPTER}")})
    names = [str(run.parent) for run in runs if (run / ADAPTER_CONFIG).is_file()]
    if names:
        return f" has no adapter; runs in it: {', '.join(names[:RUNS_SHOWN])}"
    return f" has no adapter ({ADAPTER_CONFIG})"


def settings_of(adapter: str | Path) -> dict[str, Any]:
    """Returns the settings of the run that wrote an adapter or model, as in its `config.toml`; empty if not known."""
    _, settings = _command_and_settings(adapter)
    return settings


def _command_and_settings(adapter: str | Path) -> tuple[str, dict[str, Any]]:
    """Returns the command of the run that wrote an adapter or model, and its settings; both empty if not known."""
    run, _ = run_and_step(adapter)
    with contextlib.suppress(UsageError):
        for command, table in load_toml(run / run_files.CONFIG).items():
            if isinstance(table, dict):
                return command, table
    return "", {}


def _inheritable_settings(adapter: str | Path) -> dict[str, Any]:
    """Returns the settings of an adapter's run that other commands may take.

    These are all, except max_length of an SFT run, which limits rows and not episodes.
    """
    command, settings = _command_and_settings(adapter)
    if command == "sft":
        return {name: value for name, value in settings.items() if name != "max_length"}
    return settings


def in_common(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the settings that have the same value in all runs."""
    if not runs:
        return {}
    return {name: value for name, value in runs[0].items() if all(run.get(name) == value for run in runs)}


def inherited_settings(config: Any, explicit: Collection[str]) -> dict[str, InheritedSetting]:
    """Returns the settings, by name, that a command takes from its index and from the run of its adapter.

    `explicit` are the names of those that the user has set, which are left out.
    """
    values = flat(config)
    inherited = {}
    of_index = _encoder_of_index(values)
    place, of_run = _settings_of_runs(values)
    for section in sections(config).values():
        kinds = kinds_of(type(section))
        # If the user chose another format than the run's, no setting of this section is inherited: they are prompts and
        # limits of the run's format.
        is_other_format = "format" in kinds and "format" in explicit and of_run.get("format") != values["format"]
        for name, kind in kinds.items():
            if name in explicit:
                continue
            if Trait.OF_INDEX in kind.traits and name in of_index:
                inherited[name] = of_index[name]
            value = of_run.get(name)
            if Trait.OF_RUN not in kind.traits or value is None or is_other_format:
                continue
            # A file that no longer exists is not inherited; "none" stands for no file.
            is_gone = input_path(kind) is not None and value != "none" and not exists_or_shipped(value)
            if not is_gone:
                inherited[name] = InheritedSetting(value, place)
    return inherited


def _encoder_of_index(values: Mapping[str, Any]) -> dict[str, InheritedSetting]:
    """Returns the encoder of the index that is searched or edited; nothing if there is none."""
    place = values.get("index")
    if values.get("add") or values.get("delete"):  # flags of the command `index`, which edits the index in --output
        place = values["output"]
    searches_vectors = "retriever" not in values or values["retriever"] in VECTOR_RETRIEVERS
    if not place or not searches_vectors:
        return {}
    with contextlib.suppress(R3LiteError):  # it is raised again when the index is opened
        encoder = read_record(Path(place) / MANIFEST, "").text("encoder")
        return {"encoder": InheritedSetting(encoder, place)}
    return {}


def _settings_of_runs(values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the paths of the adapters and the settings that their runs have in common.

    If there is no adapter, and the model is that of a run with all weights trained, returns the model's path and the
    settings of that run.
    """
    adapters = [values.get("adapter")]
    for entry in values.get("adapters") or values.get("average") or ():
        adapters.append(name_and_path(entry)[1])
    adapters = [adapter for adapter in adapters if adapter]
    model = values.get("model")
    if not adapters and model and Path(model).name == MODEL:
        of_model = _inheritable_settings(model)
        of_model.pop("model", None)  # the base that the run started from
        return model, of_model
    runs = [_inheritable_settings(adapter) for adapter in adapters]
    return ", ".join(adapters), in_common([run for run in runs if run])


def lines_of_inherited(config: Any) -> Iterator[str]:
    """Yields a line for each index or adapter whose settings a command has taken."""
    values = flat(config)
    by_place: dict[str, list[str]] = {}
    for name, place in config.inherited.items():
        by_place.setdefault(place, []).append(f"{flag(name)} {values[name]}")
    for place, settings in by_place.items():
        yield f"from {place}: {', '.join(settings)}"
