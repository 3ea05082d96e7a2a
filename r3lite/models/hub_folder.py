"""The folder of a model of the Hugging Face hub: what is downloaded of it, or is there already.

The small files of the root are downloaded first, then only the weights that these name: a repository may have the same
weights several times (`consolidated.safetensors`, `onnx/`, `original/`).
"""

from pathlib import Path

from r3lite.core.errors import R3LiteError
from r3lite.core.files import parse_at_place, read_text, similar_path
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

    The cached folder may lack small files: which of them a library reads is not known, and the error about a file that
    r3lite lacks is raised where it is read.
    """
    import huggingface_hub
    from huggingface_hub import errors

    incomplete = getattr(errors, "IncompleteSnapshotError", ())  # huggingface_hub before 1.22 returns what is cached
    try:
        try:
            small = {"allow_patterns": list(ROOT), "ignore_patterns": [BELOW]}
            folder = Path(huggingface_hub.snapshot_download(model, **small))
        except incomplete as error:
            folder = Path(error.snapshot_path)
        # The weights are of the same commit as the small files: the folder's name.
        weights = {"allow_patterns": weight_files(folder), "revision": folder.name}
        return Path(huggingface_hub.snapshot_download(model, **weights))
    except (errors.HTTPError, OSError, ValueError) as error:  # HTTPError: of the HTTP library that huggingface_hub uses
        message = str(error).strip()
        reason = message.splitlines()[0] if message else type(error).__name__
        name = f"{model}{similar_path(model)}"
        cause = f"the model {name} is neither a folder nor cached, and could not be downloaded: {reason}"
        raise R3LiteError(cause, REMEDY, code="model-absent") from error


def weight_files(folder: Path) -> list[str]:
    """Returns names and patterns of the weight files that a model's small files name, and of its modules' files."""
    files = [SINGLE]
    if (folder / INDEX).is_file():
        files = indexed_files(folder)
    path = folder / MODULES
    if path.is_file():
        modules = parse_at_place(path, REMEDY, read_text(path, REMEDY))
        record = Record({"modules": modules}, Source(str(path), REMEDY))
        for module in record.records("modules"):
            module_folder = module.text("path", "", blank=True)
            if module_folder:
                files += [f"{module_folder}/{pattern}" for pattern in OF_MODULE]
    return files
