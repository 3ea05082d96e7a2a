"""The files of an export, and whether a folder is one."""

from pathlib import Path

GGUF, ADAPTER, CARD, MODELFILE = "model.gguf", "adapter.gguf", "README.md", "Modelfile"
FILES = {"folder": None, "gguf": GGUF, "adapter": None, "gguf-adapter": ADAPTER}  # None: the folder itself


def is_export(folder: Path) -> bool:
    """Whether a folder is what an export writes: one with a card, whose weights are beside it."""
    named = ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors", GGUF, ADAPTER)
    return (folder / CARD).is_file() and any((folder / name).is_file() for name in named)
