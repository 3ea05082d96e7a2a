"""The files of an export, and whether a folder is one."""

from pathlib import Path

GGUF = "model.gguf"
ADAPTER = "adapter.gguf"
CARD = "README.md"
MODELFILE = "Modelfile"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors", GGUF, ADAPTER)
FILES = {"folder": None, "gguf": GGUF, "adapter": None, "gguf-adapter": ADAPTER}  # None: the folder itself


def is_export(folder: Path) -> bool:
    """Returns whether a folder is what an export writes: one with a card, whose weights are beside it."""
    if not (folder / CARD).is_file():
        return False
    return any((folder / name).is_file() for name in WEIGHTS)
