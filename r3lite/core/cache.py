"""What r3lite keeps in its folder for later starts, how large it is, and how it is removed."""

import shutil
from pathlib import Path

from r3lite.core.files import PART, sole_writer

CACHE = "~/.cache/r3lite"
CLEAR = "python -m r3lite.doctor --clear-cache"
# Patterns of names, by what is kept under them. All of it is made again when it is needed.
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
    """Returns the files and folders of each kind that there are."""
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


def _written_as(entry: Path) -> Path:
    """Returns what `.NAME.PID.part` becomes, NAME, whose lock its writer holds; other entries as they are."""
    if not entry.name.endswith(PART):
        return entry
    name, _, _ = entry.name.removeprefix(".").removesuffix(PART).rpartition(".")
    return entry.with_name(name or entry.name)


def clear() -> None:
    """Removes what is cached; raises R3LiteError if another process writes a part of it. Other files stay."""
    for entries in places().values():
        for entry in entries:
            with sole_writer(_written_as(entry), folder=False):
                if entry.is_dir():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
