"""The files that `--data` names: paths as they are, data sets known by name and hub strings by download.

Never unpickles and never runs a data set's own loading script: only JSON, JSON lines and parquet files are used. A
downloaded file is refused if it does not have the checksum that the hub states for it.
"""

import contextlib
import hashlib
import re
from pathlib import Path, PurePosixPath
from typing import Any

from r3lite.core.errors import R3LiteError
from r3lite.core.files import similar_path
from r3lite.settings.data import DATA_REMEDY

# The regular expressions of the wildcards in patterns of files; a set of characters such as [0-9] is one by itself.
WILDCARDS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
WILDCARD = re.compile(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])")
KINDS = (".jsonl", ".json", ".parquet")  # in order of preference: parquet needs an extra
TIMEOUT = 10.0  # seconds for the hub's answer to a listing
# The branch to which the hub converts data sets that have only a loading script.
CONVERTED = "refs/convert/parquet"
# By short name (DATA_SETS of settings/data.py): the repository, the subset and the name of its validation split. The
# training split is called train in all of them.
NAMED = {
    "hotpotqa": ("hotpotqa/hotpot_qa", "distractor", "validation"),
    "2wiki": ("xanhho/2WikiMultihopQA", "", "dev"),
    "musique": ("dgslibisey/MuSiQue", "musique_ans", "dev"),
}


def files_of(data: str) -> list[Path]:
    """Returns the files behind a path, a short name `hotpotqa,train`, or a hub string `name,subset,split`.

    A short name alone is the training split. The subset of a hub string may be empty: `name,,split`.
    """
    path = Path(data)
    if path.exists() and not path.is_dir():
        return [path]
    parts = hub_string(data)
    if parts:
        repository, subset, split = parts
        return _download(repository, subset, split)
    if path.is_dir():
        remedy = (
            "Pass a file in it. To learn from a folder of documents: python -m r3lite.index --documents FOLDER, then "
        )
        remedy += "python -m r3lite.collect --source documents."
        raise R3LiteError(f"--data {data} is a folder", remedy, code="data-is-folder")
    raise R3LiteError(f"--data {data}: no such file{similar_path(data)}", DATA_REMEDY, code="data-absent")


def hub_string(data: str) -> tuple[str, str, str] | None:
    """Returns repository, subset and split of a short name or hub string; None if it is neither."""
    parts = [part.strip() for part in data.split(",")]
    name = parts[0]
    if name in NAMED and len(parts) <= 2:
        repository, subset, validation = NAMED[name]
        split = "train"
        if len(parts) == 2:
            split = parts[1]
        if split not in ("train", "validation", validation):
            raise R3LiteError(
                f"{name} has no split {split!r} with answers",
                f"Pass {name},train or {name},validation.",
                code="split-absent",
            )
        if split != "train":
            split = validation
        return repository, subset, split
    if len(parts) != 3:
        return None
    repository, subset, split = parts
    if not repository or not split:
        return None
    return repository, subset, split


def _download(name: str, subset: str, split: str) -> list[Path]:
    """Downloads the files of a subset and split of a data set, and returns their paths."""
    from huggingface_hub import HfApi, errors, hf_hub_download

    # The base class of the errors of the HTTP client, which depends on the version of huggingface_hub.
    client_error = errors.HfHubHTTPError.__bases__[0]
    options = {"timeout": TIMEOUT, "files_metadata": True}
    try:
        info = HfApi().dataset_info(name, **options)
        if not _data_files(info.siblings):
            with contextlib.suppress(errors.RevisionNotFoundError):
                info = HfApi().dataset_info(name, revision=CONVERTED, **options)
        checksums = _data_files(info.siblings)
        file_names = on_card(info.card_data, list(checksums), subset=subset, split=split)
        if not file_names:
            file_names = pick(list(checksums), name, subset=subset, split=split)
        paths = []
        for file_name in file_names:
            path = hf_hub_download(
                name,
                file_name,
                repo_type="dataset",
                revision=info.sha,  # the revision whose files were listed: a newer one may arrive between two downloads
                etag_timeout=TIMEOUT,
            )
            paths.append(_checked(Path(path), checksums[file_name]))
        return paths
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise R3LiteError(
            f"the hub has no readable data set {name!r}", "Check the name, or set HF_TOKEN.", code="dataset-absent"
        ) from error
    except (OSError, client_error) as error:
        first_line = (str(error).splitlines() or [""])[0]
        reason = f"{type(error).__name__}: {first_line}"
        remedy = "Download it elsewhere (hotpot_train_v1.1.json from hotpotqa.github.io), and pass the file as --data."
        raise R3LiteError(
            f"the data set {name!r} cannot be downloaded: {reason}", remedy, code="download-failed"
        ) from error


def _data_files(siblings: list | None) -> dict[str, str | None]:
    """Returns the SHA-256 of each listed data file, by its path; None for a small file, for which git has none."""
    checksums = {}
    for sibling in sorted(siblings or [], key=lambda file: file.rfilename):
        if not sibling.rfilename.endswith(KINDS):
            continue
        checksums[sibling.rfilename] = None
        if sibling.lfs:
            checksums[sibling.rfilename] = sibling.lfs.sha256
    return checksums


def _checked(path: Path, checksum: str | None) -> Path:
    """Returns the path of a downloaded file; raises R3LiteError unless it has the hub's checksum."""
    if checksum is not None and sha256(path) != checksum:
        raise R3LiteError(
            f"{path} is damaged: its SHA-256 is not that of the hub",
            f"Delete {path}, and try again.",
            code="download-damaged",
        )
    return path


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def on_card(card: Any, files: list[str], subset: str, split: str) -> list[str]:
    """Returns the files that a data set's card names for a subset and split, in the card's order; [] if it names none.

    See https://huggingface.co/docs/hub/datasets-manual-configuration: `configs` is a list of subsets, each with a
    `config_name` and `data_files`. `data_files` is a pattern or a list of patterns for the split train, or a list of
    objects, each with a `split` and, under `path`, the pattern or patterns of this split.
    """
    listed = None
    if card:
        listed = card.get("configs")
    if not isinstance(listed, list):
        return []
    configs = [config for config in listed if isinstance(config, dict)]
    of_subset = [config for config in configs if config.get("config_name") == (subset or "default")]
    if not of_subset and not subset and len(configs) == 1:
        of_subset = configs
    for config in of_subset:
        entries = _as_list(config.get("data_files"))
        if not all(isinstance(entry, dict) for entry in entries):
            entries = [{"split": "train", "path": entries}]
        for entry in entries:
            if entry.get("split") == split:
                return _matching(files, _as_list(entry.get("path")))
    return []


def _as_list(value: Any) -> list:
    """Returns a list as it is, and any other value in a list."""
    if isinstance(value, list):
        return value
    return [value]


def _matching(files: list[str], patterns: list) -> list[str]:
    """Returns the files that match a pattern, each once, in the order of the patterns.

    As on the hub, `*` and `?` stay within a folder, and `**` crosses folders. A pattern that is no text is left out.
    """
    matching: dict[str, None] = {}  # an ordered set
    for pattern in patterns:
        if isinstance(pattern, str):
            expression = re.compile("".join(map(_expression_of, WILDCARD.split(pattern))))
            matching |= dict.fromkeys(file for file in files if expression.fullmatch(file))
    return list(matching)


def _expression_of(part: str) -> str:
    """Returns the regular expression of a part of a pattern: of a wildcard, or of plain text."""
    if WILDCARD.fullmatch(part) and part.startswith("["):
        return part.replace("[!", "[^")
    return WILDCARDS.get(part, re.escape(part))


def pick(files: list[str], name: str, subset: str, split: str) -> list[str]:
    """Returns the files whose paths have a subset and a split as whole words; all of them have the same ending.

    Files with the split in their own name are preferred to files with it in a folder's name. Raises R3LiteError if
    there are none, or if they are in several folders, which are several subsets.
    """
    of_subset = [file for file in files if not subset or _has_word(file, subset)]
    candidates = [file for file in of_subset if _has_word(PurePosixPath(file).name, split)]
    if not candidates:
        candidates = [file for file in of_subset if _has_word(file, split)]
    for kind in KINDS:
        of_kind = [file for file in candidates if file.endswith(kind)]
        folders = sorted({str(PurePosixPath(file).parent) for file in of_kind})
        if len(folders) > 1:
            raise R3LiteError(
                f"{name} has several subsets: {', '.join(folders)}",
                f"Pass {name},SUBSET,{split}.",
                code="subset-ambiguous",
            )
        if of_kind:
            return of_kind
    available = ", ".join(files[:10]) or "no JSON or parquet file (a loading script is never run)"
    raise R3LiteError(
        f"{name} has no file for subset {subset!r} and split {split!r}", f"It has {available}.", code="subset-absent"
    )


def _has_word(path: str, word: str) -> bool:
    return re.search(rf"(?<![a-z0-9]){re.escape(word.lower())}(?![a-z0-9])", path.lower()) is not None
