"""What r3lite keeps in its folder for later starts, how large it is, and how it is removed."""

import shutil
from pathlib import Path

from r3lite.core.files import PART, sole_writer

CACHE = "~/.cache/r3lite"
CLEAR = "python -m r3lite.doctor --clear-cache"
# What is kept in the cache, and the pattern of its files' or folders' names. Anything that was removed is made again
# when it is needed.
KINDS = {
    "NF4 weights": "[!.]*-nf4-*",
    "GGUF tokenizers": "[!.]*-gguf-*",
    "web results": "web",
    "what was not finished": ".*.part",
    "measured speeds": "speeds.json",
}


def size_of(place: Path) -> int:
    """Returns the bytes of a file, or of all files in a folder."""
    if place.is_file():
        return place.stat().st_size
    return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())


def places() -> dict[str, list[Path]]:
    """Returns the files and folders in the cache by kind. Kinds of which there is nothing are left out."""
    folder = Path(CACHE).expanduser()
    by_kind = {}
    for kind, pattern in KINDS.items():
        entries = sorted(folder.glob(pattern))
        if entries:
            by_kind[kind] = entries
    return by_kind


def summary() -> str:
    """Returns what the cache has, as in `447 MB in ~/.cache/r3lite: NF4 weights`."""
    by_kind = places()
    size = sum(size_of(entry) for entries in by_kind.values() for entry in entries)
    kinds = ", ".join(by_kind) or "nothing"
    return f"{size / 1e6:,.0f} MB in {CACHE}: {kinds}"


def _finished_path(entry: Path) -> Path:
    """Returns the path that an entry has when it is finished: `.NAME.PID.part` is then called NAME.

    The writer of an unfinished entry holds the lock of this path. A finished entry's path is returned as it is.
    """
    if not entry.name.endswith(PART):
        return entry
    name, _, _ = entry.name.removeprefix(".").removesuffix(PART).rpartition(".")
    return entry.with_name(name or entry.name)


def clear() -> None:
    """Removes the files and folders of all KINDS. Other files in the folder stay.

    Raises R3LiteError at an entry that another process writes; entries before it are gone by then.
    """
    for entries in places().values():
        for entry in entries:
            with sole_writer(_finished_path(entry), folder=False):
                if entry.is_dir():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
