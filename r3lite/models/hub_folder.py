"""The folder of a model of the Hugging Face hub: what is downloaded of it, or is there already.

Small files of its root, then the weights that they name: a repository may have the same weights several times
(`consolidated.safetensors`, `onnx/`, `original/`).
"""

from pathlib import Path

from r3lite.core.errors import R3LiteError
from r3lite.core.files import read_text, similar_path, within
from r3lite.core.records import Record, Source
from r3lite.models.tensor_files import INDEX, SINGLE, indexed_files

ROOT = ("*.json", "*.txt", "*.jinja")
BELOW = "*/*"
MODULES = "modules.json"  # of sentence-transformers: modules have folders, with files of their own
OF_MODULE = ("*.json", "*.txt", "*.safetensors")
REMEDY = (
    "Check the name and the connection, or copy the model's config.json, tokenizer.json, tokenizer_config.json "
    "and *.safetensors to a folder and pass --model FOLDER. --model tiny needs no download."
)


def download(model: str) -> Path:
    """Returns the folder of a hub id. Without a connection it is the cached one, if it has the weights.

    Of the small files nobody knows which a library reads, and one that r3lite lacks is named where it is read.
    """
    import huggingface_hub
    from huggingface_hub import errors

    incomplete = getattr(errors, "IncompleteSnapshotError", ())  # of 1.22 and later; before, what is cached is taken
    try:
        try:
            small = {"allow_patterns": list(ROOT), "ignore_patterns": [BELOW]}
            folder = Path(huggingface_hub.snapshot_download(model, **small))
        except incomplete as error:
            folder = Path(error.snapshot_path)
        # Of the same commit, which is the folder's name.
        weights = {"allow_patterns": weight_files(folder), "revision": folder.name}
        return Path(huggingface_hub.snapshot_download(model, **weights))
    except (errors.HTTPError, OSError, ValueError) as error:  # HTTPError: of the HTTP library that it uses
        message = str(error).strip()
        reason = message.splitlines()[0] if message else type(error).__name__
        name = f"{model}{similar_path(model)}"
        cause = f"the model {name} is neither a folder nor cached, and could not be downloaded: {reason}"
        raise R3LiteError(cause, REMEDY, code="model-absent") from error


def weight_files(folder: Path) -> list[str]:
    """Returns the files of weights that a model's small files name, and those of its modules; patterns among them."""
    files = [SINGLE]
    if (folder / INDEX).is_file():
        files = indexed_files(folder)
    path = folder / MODULES
    if path.is_file():
        modules = within(path, REMEDY, read_text(path, REMEDY))
        record = Record({"modules": modules}, Source(str(path), REMEDY))
        for module in record.records("modules"):
            module_folder = module.text("path", "", blank=True)
            if module_folder:
                files += [f"{module_folder}/{pattern}" for pattern in OF_MODULE]
    return files
