"""Uploads an exported folder to the Hugging Face hub, in one commit: a private repository, or a pull request."""

import os
from pathlib import Path

from r3lite.core.errors import R3LiteError, explained

TOKEN = "HF_TOKEN"


def token() -> str:
    """The token of the hub, from the environment alone."""
    if found := os.environ.get(TOKEN, "").strip():
        return found
    remedy = f"Create one with write access at https://huggingface.co/settings/tokens, and export {TOKEN}=..."
    raise R3LiteError(f"uploading needs a token, but {TOKEN} is not set", remedy, code="hub-token-missing")


def files_of(folder: Path) -> list[Path]:
    """What is uploaded of a folder: its own files, without hidden ones and links."""
    return sorted(p for p in folder.iterdir() if p.is_file() and not p.is_symlink() and not p.name.startswith("."))


def summary(folder: Path, repository: str, kind: str) -> str:
    """What an upload would do."""
    files = files_of(folder)
    where = "a pull request to" if kind == "pull-request" else "the private repository"
    width = max(len(path.name) for path in files)
    lines = [f"upload      {folder} to {where} {repository}: {len(files)} files"]
    lines += [f"  {path.name:<{width}}  {path.stat().st_size / (1 << 20):>9,.2f} MiB" for path in files]
    return "\n".join(lines)


def push(folder: Path, repository: str, kind: str) -> str:
    """Uploads a folder and returns the address of what came of it.

    A private repository is made if there is none of that name; one that is public is refused.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HTTPError  # that of the HTTP library which it uses

    api, as_request = HfApi(token=token()), kind == "pull-request"
    remedy = f"Check the name, the permissions of {TOKEN} and the connection, and run the same command again."
    with explained(
        (HTTPError, OSError, ValueError), f"the upload to {repository} failed", remedy, code="upload-failed"
    ):
        if not as_request:
            api.create_repo(repository, private=True, exist_ok=True)
            if not api.model_info(repository).private:
                private = "Pass another repository, make it private, or pass --push-as pull-request."
                raise R3LiteError(f"{repository} is public; nothing was uploaded", private, code="repository-public")
        added = [CommitOperationAdd(path.name, str(path)) for path in files_of(folder)]
        done = api.create_commit(repository, added, commit_message="Exported by r3lite", create_pr=as_request)
    return done.pr_url if as_request else f"{api.endpoint}/{repository}"
