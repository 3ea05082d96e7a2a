"""Replies of remote services, stored on disk, so that no request is billed twice, and a run can be repeated.

Knows no network and no service. Failures are never stored.
"""

import hashlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from r3lite.core.errors import R3LiteError, explained
from r3lite.core.files import read_record, write_text
from r3lite.core.records import Record
from r3lite.core.terminal import say

T = TypeVar("T")


def digest(circumstances: dict[str, Any]) -> str:
    """Returns the name of a reply in the cache: a hash of all that the reply depends on."""
    text = json.dumps(circumstances, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class ReplyCache:
    """A folder of replies, each a JSON file named by its digest; without a folder nothing is stored.

    Several processes may share the folder: files are written whole. `flag` is the setting that names it.
    Raises R3LiteError if the path is not a folder.
    """

    def __init__(self, folder: Path | None, flag: str):
        self.folder = folder and folder.expanduser()
        self.flag = flag
        self._lock = threading.Lock()
        if not self.folder:
            return
        candidates = (self.folder, *self.folder.absolute().parents)
        existing = next(path for path in candidates if path.exists())
        if not existing.is_dir():
            raise R3LiteError(f"{flag} {folder} is not a folder", f"Pass another {flag}.", code="not-a-folder")

    def recall(self, key: str, read: Callable[[Record], T]) -> T | None:
        """Returns what `read` makes of the reply under a key; None if there is no such reply.

        If the file is damaged, or `read` raises InvalidRecord, prints a warning and returns None, too.
        """
        if self.folder is None:
            return None
        path = self.folder / f"{key}.json"
        if not path.exists():
            return None
        try:
            return read(read_record(path, ""))
        except R3LiteError as error:
            say(f"warning: ignoring a damaged cached reply: {error.cause}")
            return None

    def store(self, key: str, reply: dict) -> None:
        """Stores a reply; raises R3LiteError if the folder cannot be written."""
        if self.folder is None:
            return
        cause = f"replies cannot be cached in {self.folder}"
        remedy = f"Free disk space, or pass {self.flag} FOLDER."
        # The lock: equal requests of two threads would share a temporary file.
        with explained(OSError, cause, remedy, code="cache-unusable"), self._lock:
            write_text(self.folder / f"{key}.json", json.dumps(reply, ensure_ascii=False) + "\n")
