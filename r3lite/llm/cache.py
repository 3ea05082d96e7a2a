"""Replies of remote models kept on disk, so that no request is billed twice.

Knows no network. Failures are never kept.
"""

import hashlib
import json
import sys
import threading
from dataclasses import replace
from pathlib import Path

from r3lite.core.errors import R3LiteError, explained
from r3lite.core.files import read_record, write_text
from r3lite.llm.replies import Reply, Request, parse


def digest(request: Request, circumstances: dict) -> str:
    """A name for all that a reply depends on: the request and the circumstances (model, address, ...)."""
    names = ("prompt", "system", "earlier", "max_output_tokens", "nonce", "schema")
    parts = {name: getattr(request, name) for name in names}
    return hashlib.sha256(json.dumps(circumstances | parts, sort_keys=True).encode()).hexdigest()


class ReplyCache:
    """A folder of replies, one JSON file each, by digest; without a folder it keeps nothing.

    Several processes may share the folder: files are written whole. Raises R3LiteError if it is not a folder.
    """

    def __init__(self, folder: Path | None):
        self.folder = folder
        self._lock = threading.Lock()
        if folder and not next(p for p in (folder, *folder.absolute().parents) if p.exists()).is_dir():
            raise R3LiteError(f"the cache of replies, {folder}, is not a folder", "Pass another --judge-cache.")

    def recall(self, key: str, request: Request) -> Reply | None:
        """The reply kept under a key; None if there is none, or, which is said on stderr, if its file is damaged."""
        if self.folder is None or not (path := self.folder / f"{key}.json").exists():
            return None
        try:
            reply = parse(read_record(path, "").text("text"), request)
            problem = reply.failure and f"{path} does not hold what was asked for: {reply.detail}"
        except R3LiteError as error:
            problem = error.cause
        if problem is None:
            return replace(reply, cached=True)
        print(f"a cached reply is asked for again: {problem}", file=sys.stderr)
        return None

    def store(self, key: str, reply: Reply) -> None:
        """Keeps a reply; raises R3LiteError if the folder cannot be written."""
        if self.folder is None:
            return
        cause, remedy = f"replies cannot be cached in {self.folder}", "Make room, or pass --judge-cache FOLDER."
        # The lock: equal requests of two threads would share a temporary file.
        with explained(OSError, cause, remedy), self._lock:
            write_text(self.folder / f"{key}.json", json.dumps({"text": reply.text}, ensure_ascii=False) + "\n")
