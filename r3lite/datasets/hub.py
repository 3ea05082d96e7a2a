"""The files that `--data` names: paths as they are, hub strings by download.

Never unpickles and never runs a data set's own loading script: only JSON, JSON lines and parquet files are used.
"""

import contextlib
import re
from pathlib import Path, PurePosixPath

from r3lite.errors import R3LiteError

KINDS = (".jsonl", ".json", ".parquet")  # in order of preference: parquet needs an extra
TIMEOUT = 10.0  # seconds for the hub's answer to a listing
# Script-only data sets are converted by the hub itself, to this branch.
CONVERTED = "refs/convert/parquet"


def files_of(data: str) -> list[Path]:
    """The files behind a path or a hub string `name,subset,split` (subset may be empty: `name,,split`)."""
    path = Path(data)
    if path.exists() and not path.is_dir():
        return [path]
    parts = [p.strip() for p in data.split(",")]
    if len(parts) == 3 and parts[0] and parts[2]:
        return _download(*parts)
    if path.is_dir():
        raise R3LiteError(f"--data {data} is a folder", "Name one file in it.")
    raise R3LiteError(
        f"--data {data}: there is no such file", "Name a question file, or a hub string name,subset,split."
    )


def _download(name: str, subset: str, split: str) -> list[Path]:
    from huggingface_hub import HfApi, errors, hf_hub_download

    # The errors of the HTTP client, which is another one in other versions of the hub library.
    client_error = errors.HfHubHTTPError.__bases__[0]
    try:
        revision, files = None, _data_files(HfApi(), name, None)
        if not files:
            with contextlib.suppress(errors.RevisionNotFoundError):
                revision, files = CONVERTED, _data_files(HfApi(), name, CONVERTED)
        chosen = pick(files, name, subset, split)
        kind = {"repo_type": "dataset", "revision": revision, "etag_timeout": TIMEOUT}
        return [Path(hf_hub_download(name, file, **kind)) for file in chosen]
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise R3LiteError(
            f"the hub has no data set {name!r} that can be read", "Check the name; a private one needs a login."
        ) from error
    except (OSError, client_error) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise R3LiteError(
            f"the data set {name!r} cannot be fetched from the hub: {type(error).__name__}: {reason}",
            f"Download it where there is a network, and pass the file's path to --data, not {name},{subset},{split}. "
            "For HotpotQA: hotpot_train_v1.1.json or hotpot_dev_distractor_v1.json from https://hotpotqa.github.io.",
        ) from error


def _data_files(api, name: str, revision: str | None) -> list[str]:
    info = api.dataset_info(name, revision=revision, timeout=TIMEOUT)
    return sorted(s.rfilename for s in info.siblings or [] if s.rfilename.endswith(KINDS))


def pick(files: list[str], name: str, subset: str, split: str) -> list[str]:
    """The files of one subset and split, of one kind. Both names are looked for as whole words of the path."""
    of_subset = [f for f in files if not subset or _names(f, subset)]
    in_name = [f for f in of_subset if _names(PurePosixPath(f).name, split)]
    chosen = in_name or [f for f in of_subset if _names(f, split)]
    for kind in KINDS:
        same = [f for f in chosen if f.endswith(kind)]
        folders = sorted({str(PurePosixPath(f).parent) for f in same})
        if len(folders) > 1:
            raise R3LiteError(
                f"{name} has the split {split!r} in several subsets: {', '.join(folders)}",
                f"Name one: {name},SUBSET,{split}",
            )
        if same:
            return same
    there = ", ".join(files[:10]) or "no JSON or parquet file (a loading script is never run)"
    raise R3LiteError(
        f"{name} has no file for subset {subset!r} and split {split!r}; there is {there}",
        "Name a subset and a split that are there.",
    )


def _names(path: str, word: str) -> bool:
    return re.search(rf"(?<![a-z0-9]){re.escape(word.lower())}(?![a-z0-9])", path.lower()) is not None
