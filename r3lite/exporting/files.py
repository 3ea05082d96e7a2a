"""The files of an export, and whether a folder is one."""

from pathlib import Path

GGUF = "model.gguf"
ADAPTER = "adapter.gguf"
CARD = "README.md"
TRAINED_BY = "trained with r3lite"  # in the heading of a card
MODELFILE = "Modelfile"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors", GGUF, ADAPTER)
# By --form, the one file that has the weights; None: the weights are in a folder of files as transformers or PEFT read.
FILES = {"folder": None, "gguf": GGUF, "adapter": None, "gguf-adapter": ADAPTER}


def is_trained_export(path: Path) -> bool:
    """Returns whether a folder, or the folder of a file, is an export whose card says that r3lite has trained it."""
    folder = path
    if path.is_file():
        folder = path.parent
    return is_export(folder) and TRAINED_BY in (folder / CARD).read_text(encoding="utf-8", errors="replace")


def is_export(folder: Path) -> bool:
    """Returns whether a folder looks like an export: it has a card and weights."""
    if not (folder / CARD).is_file():
        return False
    return any((folder / name).is_file() for name in WEIGHTS)
