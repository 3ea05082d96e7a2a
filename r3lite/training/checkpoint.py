"""Checkpoints: all that an exact resume needs, in safetensors and JSON, written as a whole or not at all.

A checkpoint is the folder `checkpoint-<step>`:

    weights.safetensors     trainable tensors, by parameter name
    optimizer.safetensors   moments of AdamW
    random.safetensors      states of PyTorch's generators, as bytes
    <part>.safetensors      tensors of a further part of the run, such as the replay buffer
    state.json              step, settings, loss scale, fingerprints of the inputs, and the JSON values of the parts
    adapter/                the adapter in PEFT's form, so that a checkpoint can be evaluated; not in full fine-tuning
    manifest.json           size and CRC-32 of every other file; written last

It is written under another name, each file is flushed to the disk, and then it is renamed. So a kill or a power cut at
any moment never leaves half of a checkpoint. No file is a pickle.
"""

import os
import shutil
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from r3lite.core.errors import R3LiteError, explained
from r3lite.core.files import PART, move, open_regular, read_record, write_json
from r3lite.core.inherited import ADAPTER, CHECKPOINT, folders_by_step
from r3lite.models.tensor_files import write_tensors

MANIFEST = "manifest.json"
STATE = "state.json"
GROUPS = ("weights", "optimizer", "random")  # the groups of tensors that every checkpoint has; each is one file
FORMAT = 1
REMEDY = "Pass another checkpoint, or --resume auto for the latest valid one."


@dataclass(frozen=True)
class Checkpoint:
    """The content of one checkpoint."""

    step: int
    tensors: dict[str, dict[str, Tensor]]  # by group (GROUPS, and the parts that have tensors), then by name
    state: dict  # the content of state.json


def sync(path: Path) -> None:
    """Flushes a file, or a folder's list of names, to the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open a folder like a file; NTFS itself journals the names
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Makes `folder` anew: `fill` writes into a temporary sibling, which is flushed and then replaces `folder`."""
    new = _hidden(folder, "new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    fill(new)
    for path in sorted(new.rglob("*")):
        sync(path)
    sync(new)
    old = None
    if folder.exists():  # a folder that is not empty cannot be replaced in one go
        old = _set_aside(folder)
    move(new, folder)
    sync(folder.parent)
    if old:
        shutil.rmtree(old, ignore_errors=True)


def _hidden(folder: Path, which: str) -> Path:
    """Returns the path of a folder's new or old version (`which`): it lies beside the folder and has a hidden name."""
    return folder.with_name(f".{folder.name}.{which}{PART}")


def _set_aside(folder: Path) -> Path:
    """Renames a folder to a hidden name, which is one operation of the file system; returns the new path."""
    old = _hidden(folder, "old")
    shutil.rmtree(old, ignore_errors=True)
    move(folder, old)
    return old


def crc(path: Path) -> int:
    """Returns the CRC-32 of a file, which is read in pieces."""
    value = 0
    with open_regular(path, REMEDY) as file:
        while piece := file.read(1 << 20):
            value = zlib.crc32(piece, value)
    return value


def write(
    output: Path,
    checkpoint: Checkpoint,
    save_adapter: Callable[[Path], None] | None,
) -> Path:
    """Writes `output/checkpoint-<step>` and returns its path.

    `save_adapter` fills the folder `adapter/` in it; None: the checkpoint has no such folder.
    """

    def fill(folder: Path) -> None:
        for name, group in checkpoint.tensors.items():
            write_tensors(folder / f"{name}.safetensors", group)
        write_json(folder / STATE, checkpoint.state)
        if save_adapter:
            (folder / ADAPTER).mkdir()
            save_adapter(folder / ADAPTER)
        files = {}
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                name = path.relative_to(folder).as_posix()
                files[name] = {"bytes": path.stat().st_size, "crc32": crc(path)}
        write_json(folder / MANIFEST, {"format": FORMAT, "step": checkpoint.step, "files": files})

    folder = output / f"checkpoint-{checkpoint.step}"
    replace_folder(folder, fill)
    return folder


def fault(folder: Path) -> str | None:
    """Returns in words what is wrong with a checkpoint; None if its files are as its manifest says and its state is
    complete."""
    try:
        _check_files(folder)
        _read_state(folder)
    except R3LiteError as error:
        return error.cause
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"cannot be read ({error})"
    return None


def _check_files(folder: Path) -> None:
    """Raises R3LiteError or OSError unless the folder holds what its manifest says."""
    (folder / MANIFEST).stat()  # raises FileNotFoundError, so that `fault` reports it like any missing file
    manifest = read_record(folder / MANIFEST, REMEDY)
    format_number = manifest.whole("format")
    if format_number != FORMAT:
        raise R3LiteError(f"format {format_number} instead of {FORMAT}", code="checkpoint-format")
    files = manifest.record("files")
    required = [f"{group}.safetensors" for group in GROUPS]
    for name in [*required, STATE]:
        if name not in files:
            raise files.wrong(name, "described")
    for name in files.values:
        entry = files.record(name)
        path = folder / name
        is_same_size = path.stat().st_size == entry.whole("bytes")
        if not is_same_size or crc(path) != entry.whole("crc32"):
            raise R3LiteError(f"{name} has changed since it was written", code="checkpoint-file-changed")


def _read_state(folder: Path) -> dict:
    """Returns the content of state.json; raises R3LiteError unless all that every run needs is there, with its type."""
    state = read_record(folder / STATE, REMEDY)
    step = state.whole("step")
    match = CHECKPOINT.fullmatch(folder.resolve().name)
    if match and int(match[1]) != step:  # the name says another step
        raise state.error(f"step is {step}")
    state.text("command")
    state.text("data", blank=True)
    # Checkpoints of earlier versions lack `base` and `inputs`; then `record` returns an empty one.
    state.text("base", default=None)
    inputs = state.record("inputs")
    for name in inputs.values:
        inputs.text(name)
    state.whole("num_tokens")
    state.number("seconds", low=0)
    for key in ("settings", "precision", "kept"):
        if key not in state:
            raise state.wrong(key, "a JSON object")
        state.record(key)
    parts = state.record("kept")
    for name in parts.values:
        parts.record(name)
    return state.values


def read(folder: Path) -> Checkpoint:
    """Reads a checkpoint; raises R3LiteError unless it is valid."""
    problem = fault(folder)
    if problem is not None:
        raise R3LiteError(f"{folder} is not a valid checkpoint: {problem}", REMEDY, code="checkpoint-invalid")
    files = read_record(folder / MANIFEST, REMEDY).record("files").values
    paths = [folder / name for name in files if name.endswith(".safetensors") and "/" not in name]
    with explained(SafetensorError, f"{folder} has unreadable tensors", REMEDY, code="checkpoint-unreadable"):
        tensors = {path.stem: safetensors.torch.load_file(path) for path in paths}
    state = _read_state(folder)
    return Checkpoint(state["step"], tensors, state)


def newest_valid(output: Path) -> Path | None:
    """Returns the folder of the latest valid checkpoint, or None. Warns of later ones that are not valid."""
    for folder in reversed(folders_by_step(output).values()):
        problem = fault(folder)
        if problem is None:
            return folder
        print(f"warning: skipping {folder}: {problem}", file=sys.stderr)
    return None


def prune(output: Path, keep: int, spare: int | None = None) -> None:
    """Removes all checkpoints except the newest `keep` ones and the one of step `spare`.

    If a checkpoint cannot be removed, a warning is printed and the run goes on.
    """
    for step, folder in list(folders_by_step(output).items())[:-keep]:
        if step == spare:
            continue
        try:
            remove(folder)
        except R3LiteError as error:
            print(f"warning: {error}", file=sys.stderr)


def remove(folder: Path) -> None:
    """Removes a checkpoint. It is renamed first, so that a kill midway leaves no half-removed folder with its name."""
    # On Windows a folder cannot be renamed while a program has one of its files open.
    with explained(
        OSError,
        f"{folder} cannot be removed",
        "Close the programs that use it, and run again.",
        code="checkpoint-not-removed",
    ):
        old = _set_aside(folder)
    shutil.rmtree(old, ignore_errors=True)
