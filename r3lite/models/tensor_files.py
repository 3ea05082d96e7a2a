"""Safetensors files: read with errors that name the file, written whole or not at all."""

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from r3lite.core.errors import R3LiteError
from r3lite.core.files import GGUF_POINTER, PART, check_regular, move, read_record
from r3lite.core.records import parse, shown
from r3lite.models.gguf_files import GgufTensors

SINGLE = "model.safetensors"  # the weights of a folder in one file
INDEX = "model.safetensors.index.json"  # the list of several files
REMEDY = "Download the file again."
SOURCE = "Copy {} from the model's source."


def indexed_files(folder: Path) -> list[str]:
    """Returns the names of the files of weights that a folder's index lists, which must lie in the folder."""
    record = read_record(folder / INDEX, SOURCE.format(INDEX))
    weight_map = record.record("weight_map")
    names = {weight_map.text(tensor) for tensor in weight_map.values}
    if not names:
        raise record.error("weight_map is missing or empty")
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise record.error(f"weight_map has {shown(name)}, not the name of a safetensors file in the folder")
    return sorted(names)


@contextlib.contextmanager
def opened(path: str | Path, remedy: str = REMEDY) -> Iterator[safe_open | GgufTensors]:
    """Opens a file to read its tensors one by one within the `with` block; raises R3LiteError if that fails."""
    check_regular(path, remedy)  # safetensors would wait for a pipe for ever
    try:
        if Path(path).name == GGUF_POINTER:
            yield GgufTensors(Path(path))
            return
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise R3LiteError(f"{path} cannot be read: {error}", remedy, code="tensors-unreadable") from error


def read_tensors(path: str | Path, remedy: str = REMEDY) -> dict[str, Tensor]:
    """Returns all tensors of a file, by name: views of the mapped file."""
    with opened(path, remedy) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)


def write_tensors(
    path: str | Path,
    tensors: dict[str, Tensor],
    metadata: dict[str, str] | None = None,
) -> None:
    """Writes a file via a temporary one beside it, so that a crash leaves the old file or the new one.

    The same tensors and metadata give the same bytes. Raises OSError, also for a full disk.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{PART}")
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(contiguous, temporary, metadata={"format": "pt"} | (metadata or {}))
        _sort_metadata(temporary)
        os.chmod(temporary, 0o644)  # safetensors makes files that only their owner can read
        move(temporary, path)
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def _sort_metadata(path: Path) -> None:
    """Sorts a file's metadata, which safetensors writes in random order, by their names."""
    with open(path, "rb+") as file:
        size = int.from_bytes(file.read(8), "little")
        header = parse(file.read(size).decode())
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        # Spaces fill a header up to a multiple of 8 bytes.
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text = text.ljust(size)
        assert len(text) == size, "the header of a safetensors file is compact JSON"
        file.seek(8)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
