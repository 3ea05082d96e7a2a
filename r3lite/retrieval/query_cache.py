"""Vectors of queries on the disk, so that a query that was encoded once is not encoded again, by whatever run.

A file of SQLite, which several processes may use at once. A vector is kept under its query and all that decides its
bits: the encoder's settings, and what it makes of a probe. So other weights, and a processor or a number of threads
that rounds otherwise, find nothing that is not theirs, and a run gives the same with a full cache as with an empty one.
"""

import hashlib
import json
import sqlite3
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from r3lite.core.episode import Document
from r3lite.core.errors import explained
from r3lite.core.files import check_regular, check_writable
from r3lite.retrieval.encoder import Encoder

PROBE = "Who directed the film that won the prize in 1994?"
WAIT = 30  # seconds for another process that writes
COLUMNS = "id INTEGER PRIMARY KEY, key BLOB UNIQUE, vector BLOB"
# Bytes of the file that are in use.
USED = "(page_count - freelist_count) * page_size FROM pragma_page_count, pragma_freelist_count, pragma_page_size"


class QueryCache:
    """The file. Beyond `most` MiB the oldest are deleted first. Safe in threads."""

    def __init__(self, path: str | Path, most: int):
        """Raises R3LiteError if the file is no such cache or cannot be written."""
        self.path, self.most = Path(path).expanduser(), most << 20
        self.asked = self.there = 0
        self._lock = threading.Lock()
        self._working = True
        check_writable(self.path.absolute().parent)
        if self.path.exists():
            check_regular(self.path, "Pass a file for --query-cache.")
        with explained(sqlite3.Error, f"--query-cache {path} cannot be used", "Pass another file."):
            self._file = sqlite3.connect(self.path, WAIT, isolation_level="IMMEDIATE", check_same_thread=False)
            # What a power cut loses of a cache is encoded again.
            self._file.execute("PRAGMA synchronous = OFF")
            self._file.execute(f"CREATE TABLE IF NOT EXISTS queries ({COLUMNS})")

    def vectors(self, keys: list[bytes], make: Callable[[int], np.ndarray]) -> list[np.ndarray]:
        """The vector of each key: that which is kept, else what `make` gives for its place, which is kept then."""
        with self._lock:
            kept = self._tried(lambda: [self._read(key) for key in keys]) or [None] * len(keys)
            made = {i: make(i) for i, vector in enumerate(kept) if vector is None}
            self.asked, self.there = self.asked + len(kept), self.there + len(kept) - len(made)
            if made:
                self._tried(lambda: self._write([(keys[i], vector.tobytes()) for i, vector in made.items()]))
            return [made.get(i, vector) for i, vector in enumerate(kept)]

    def metrics(self) -> dict[str, float]:
        """Metrics of the queries since the last call; none if there was no query."""
        with self._lock:
            ratio = {"queries/cached_ratio": self.there / self.asked} if self.asked else {}
            self.asked = self.there = 0
            return ratio

    def line(self) -> str:
        """The same in words."""
        asked, share = self.asked, self.metrics().get("queries/cached_ratio", 0.0)
        return f"{share:.0%} of {asked} queries were cached in {self.path}"

    def _read(self, key: bytes) -> np.ndarray | None:
        row = self._file.execute("SELECT vector FROM queries WHERE key = ?", (key,)).fetchone()
        return np.frombuffer(row[0], "<f4") if row else None

    def _write(self, rows: list[tuple[bytes, bytes]]) -> None:
        oldest = "SELECT id FROM queries ORDER BY id LIMIT 1 + (SELECT COUNT(*) FROM queries) / 10"
        with self._file:  # one transaction
            self._file.executemany("INSERT OR REPLACE INTO queries (key, vector) VALUES (?, ?)", rows)
            while self._file.execute(f"SELECT {USED}").fetchone()[0] > self.most:
                # A tenth at a time, so that not every query deletes.
                self._file.execute(f"DELETE FROM queries WHERE id IN ({oldest})")

    def _tried(self, work: Callable):
        """What `work` returns; None once the file has failed, with a warning."""
        try:
            return work() if self._working else None
        except sqlite3.Error as error:
            self._working = False
            print(f"warning: continuing without --query-cache {self.path}: {error}", file=sys.stderr)
            return None


class CachedEncoder:
    """An encoder whose queries go through a cache.

    A query that is not there is encoded alone: in a batch its last bits would depend on the others.
    """

    def __init__(self, encoder: Encoder, cache: QueryCache):
        self.encoder, self.cache = encoder, cache
        self.dimension, self.settings = encoder.dimension, encoder.settings
        probe = encoder.encode_queries([PROBE]).tobytes()
        self._identity = hashlib.sha256(json.dumps(encoder.settings, sort_keys=True).encode() + probe).digest()

    def encode_queries(self, queries: list[str]) -> np.ndarray:
        keys = [hashlib.sha256(self._identity + query.encode()).digest() for query in queries]
        found = self.cache.vectors(keys, lambda i: self.encoder.encode_queries([queries[i]])[0])
        return np.stack(found) if found else np.empty((0, self.dimension), np.float32)

    def encode_passages(self, documents: list[Document], advance: Callable[[int], object]) -> np.ndarray:
        return self.encoder.encode_passages(documents, advance)
