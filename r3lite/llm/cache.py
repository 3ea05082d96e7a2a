"""Replies of remote models kept on disk, so that a request is paid for once.

Knows no network. Failures are never kept.
"""

import hashlib
import json
import threading
from dataclasses import replace
from pathlib import Path

from r3lite.errors import R3LiteError
from r3lite.files import write_text
from r3lite.llm.replies import Reply, Request, parse


def digest(request: Request, circumstances: dict) -> str:
    """A name for all that a reply depends on: the request and the circumstances (model, address, ...)."""
    names = ("prompt", "system", "temperature", "max_output_tokens", "nonce", "schema")
    parts = {name: getattr(request, name) for name in names}
    return hashlib.sha256(json.dumps(circumstances | parts, sort_keys=True).encode()).hexdigest()


class ReplyCache:
    """A folder of replies, one JSON file each, by digest; without a folder it keeps nothing."""

    def __init__(self, folder: Path | None):
        self.folder = folder
        self._lock = threading.Lock()

    def recall(self, key: str, request: Request) -> Reply | None:
        """The reply kept under a key; None if there is none, or if the file does not hold what was asked for."""
        if self.folder is None:
            return None
        try:
            record = json.loads((self.folder / f"{key}.json").read_text(encoding="utf-8"))
            reply = parse(record["text"], request)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return replace(reply, cached=True) if reply.failure is None else None

    def store(self, key: str, reply: Reply) -> None:
        """Keeps a reply; raises R3LiteError if the folder cannot be written."""
        if self.folder is None:
            return
        try:
            with self._lock:  # equal requests of two threads would share a temporary file
                write_text(self.folder / f"{key}.json", json.dumps({"text": reply.text}, ensure_ascii=False) + "\n")
        except OSError as error:
            remedy = "Make room, or pass --judge-cache FOLDER."
            raise R3LiteError(f"replies cannot be cached in {self.folder}: {error}", remedy) from error
