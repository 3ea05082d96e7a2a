"""The files that `--data` names: paths as they are, data sets known by name and hub strings by download.

Never unpickles and never runs a data set's own loading script: only JSON, JSON lines and parquet files are used. What
was downloaded has the checksum that the hub says, or is refused.
"""

import contextlib
import hashlib
import re
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from r3lite.core.errors import R3LiteError

KINDS = (".jsonl", ".json", ".parquet")  # in order of preference: parquet needs an extra
TIMEOUT = 10.0  # seconds for the hub's answer to a listing
# Script-only data sets are converted by the hub itself, to this branch.
CONVERTED = "refs/convert/parquet"


# By their short names: repository, subset and what it calls its validation split; all call the other one train.
NAMED = {
    "hotpotqa": ("hotpotqa/hotpot_qa", "distractor", "validation"),
    "2wiki": ("xanhho/2WikiMultihopQA", "", "dev"),
    "musique": ("dgslibisey/MuSiQue", "musique_ans", "dev"),
}
NAME_DATA = f"Pass a file; {', '.join(NAMED)} with ,train or ,validation; or name,subset,split of a hub data set."


def files_of(data: str) -> list[Path]:
    """The files behind a path, a short name `hotpotqa,train`, or a hub string `name,subset,split`.

    A short name alone is the training split. The subset of a hub string may be empty: `name,,split`.
    """
    path = Path(data)
    if path.exists() and not path.is_dir():
        return [path]
    if parts := hub_string(data):
        return _download(*parts)
    if path.is_dir():
        raise R3LiteError(f"--data {data} is a folder", "Pass a file in it.")
    raise R3LiteError(f"--data {data}: no such file", NAME_DATA)


def hub_string(data: str) -> tuple[str, str, str] | None:
    """Repository, subset and split of a short name or hub string; None if it is neither."""
    name, *rest = (part.strip() for part in data.split(","))
    if name in NAMED and len(rest) < 2:
        (repository, subset, validation), split = NAMED[name], rest[0] if rest else "train"
        if split not in ("train", "validation", validation):
            raise R3LiteError(f"{name} has no split {split!r} with answers", f"Pass {name},train or {name},validation.")
        return repository, subset, "train" if split == "train" else validation
    return (name, *rest) if name and len(rest) == 2 and rest[1] else None


def _download(name: str, subset: str, split: str) -> list[Path]:
    from huggingface_hub import HfApi, errors, hf_hub_download

    # The errors of the HTTP client, which is another one in other versions of the hub library.
    client_error = errors.HfHubHTTPError.__bases__[0]
    how = {"timeout": TIMEOUT, "files_metadata": True}
    try:
        info = HfApi().dataset_info(name, **how)
        if not _data_files(info.siblings):
            with contextlib.suppress(errors.RevisionNotFoundError):
                info = HfApi().dataset_info(name, revision=CONVERTED, **how)
        files = _data_files(info.siblings)
        chosen = on_card(info.card_data, list(files), subset, split) or pick(list(files), name, subset, split)
        # The commit whose files were listed, though another may arrive between two downloads.
        kind = {"repo_type": "dataset", "revision": info.sha, "etag_timeout": TIMEOUT}
        return [_checked(Path(hf_hub_download(name, file, **kind)), files[file]) for file in chosen]
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise R3LiteError(f"the hub has no readable data set {name!r}", "Check the name, or set HF_TOKEN.") from error
    except (OSError, client_error) as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        remedy = "Download it elsewhere (hotpot_train_v1.1.json from hotpotqa.github.io), and pass the file as --data."
        raise R3LiteError(f"the data set {name!r} cannot be downloaded: {reason}", remedy) from error


def _data_files(listed: list | None) -> dict[str, str | None]:
    """Path and SHA-256 of each listed file that can be read; small files in git itself have none."""
    found = sorted(listed or [], key=lambda file: file.rfilename)
    return {s.rfilename: s.lfs.sha256 if s.lfs else None for s in found if s.rfilename.endswith(KINDS)}


def _checked(path: Path, kept: str | None) -> Path:
    if kept is not None and sha256(path) != kept:
        raise R3LiteError(f"{path} is damaged: its SHA-256 is not that of the hub", f"Delete {path}, and try again.")
    return path


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def on_card(card: Any, files: list[str], subset: str, split: str) -> list[str]:
    """The files that a data set's card names for a subset and split, in its order; none if it names none.

    See https://huggingface.co/docs/hub/datasets-manual-configuration: `configs` is a list of subsets (`config_name`),
    each with `data_files`: a pattern, a list of them (train), or a list of splits with their patterns (`path`).
    """
    configs = card.get("configs") if card else None
    configs = [c for c in configs if isinstance(c, dict)] if isinstance(configs, list) else []
    named = [c for c in configs if c.get("config_name") == (subset or "default")]
    for config in named or (configs if len(configs) == 1 and not subset else []):
        entries = config.get("data_files")
        entries = entries if isinstance(entries, list) else [entries]
        for entry in entries if all(isinstance(e, dict) for e in entries) else [{"split": "train", "path": entries}]:
            if entry.get("split") == split:
                paths = entry.get("path")
                patterns = [p for p in (paths if isinstance(paths, list) else [paths]) if isinstance(p, str)]
                return [f for pattern in patterns for f in files if fnmatchcase(f, pattern)]
    return []


def pick(files: list[str], name: str, subset: str, split: str) -> list[str]:
    """The files of one subset and split, of one kind. Both names are looked for as whole words of the path."""
    of_subset = [f for f in files if not subset or _names(f, subset)]
    in_name = [f for f in of_subset if _names(PurePosixPath(f).name, split)]
    chosen = in_name or [f for f in of_subset if _names(f, split)]
    for kind in KINDS:
        same = [f for f in chosen if f.endswith(kind)]
        folders = sorted({str(PurePosixPath(f).parent) for f in same})
        if len(folders) > 1:
            raise R3LiteError(f"{name} has several subsets: {', '.join(folders)}", f"Pass {name},SUBSET,{split}.")
        if same:
            return same
    there = ", ".join(files[:10]) or "no JSON or parquet file (a loading script is never run)"
    raise R3LiteError(f"{name} has no file for subset {subset!r} and split {split!r}", f"It has {there}.")


def _names(path: str, word: str) -> bool:
    return re.search(rf"(?<![a-z0-9]){re.escape(word.lower())}(?![a-z0-9])", path.lower()) is not None
