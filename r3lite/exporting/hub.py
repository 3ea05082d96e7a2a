"""Uploads an exported folder to the Hugging Face hub, in one commit: a private repository, or a pull request."""

import os
from pathlib import Path

from r3lite.core.errors import R3LiteError, explained

TOKEN = "HF_TOKEN"


def token() -> str:
    """Returns the token of the hub, from the environment alone."""
    value = os.environ.get(TOKEN, "").strip()
    if value:
        return value
    remedy = f"Create one with write access at https://huggingface.co/settings/tokens, and export {TOKEN}=..."
    raise R3LiteError(f"uploading needs a token, but {TOKEN} is not set", remedy, code="hub-token-missing")


def files_of(folder: Path) -> list[Path]:
    """Returns the files of a folder that are uploaded, without hidden files, links and subfolders."""
    files = [path for path in folder.iterdir() if path.is_file() and not path.is_symlink()]
    return sorted(path for path in files if not path.name.startswith("."))


def summary(folder: Path, repository: str, kind: str) -> str:
    """Returns what an upload would do, in words. `kind` is that of --push-as."""
    files = files_of(folder)
    where = "the private repository"
    if kind == "pull-request":
        where = "a pull request to"
    width = max(len(path.name) for path in files)
    lines = [f"upload      {folder} to {where} {repository}: {len(files)} files"]
    for path in files:
        mib = path.stat().st_size / (1 << 20)
        lines.append(f"  {path.name:<{width}}  {mib:>9,.2f} MiB")
    return "\n".join(lines)


def push(folder: Path, repository: str, kind: str) -> str:
    """Uploads a folder and returns the address of the repository or of the pull request.

    Without a pull request, a private repository is made if there is none of that name, and a public one is refused.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HTTPError  # the error of the HTTP library that huggingface_hub uses

    api = HfApi(token=token())
    as_request = kind == "pull-request"
    remedy = f"Check the name, the permissions of {TOKEN} and the connection, and run the same command again."
    with explained(
        (HTTPError, OSError, ValueError), f"the upload to {repository} failed", remedy, code="upload-failed"
    ):
        if not as_request:
            api.create_repo(repository, private=True, exist_ok=True)
            if not api.model_info(repository).private:
                cause = f"{repository} is public; nothing was uploaded"
                remedy = "Pass another repository, make it private, or pass --push-as pull-request."
                raise R3LiteError(cause, remedy, code="repository-public")
        additions = [CommitOperationAdd(path.name, str(path)) for path in files_of(folder)]
        commit = api.create_commit(repository, additions, commit_message="Exported by r3lite", create_pr=as_request)
    if as_request:
        return commit.pr_url
    return f"{api.endpoint}/{repository}"
