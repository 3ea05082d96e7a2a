"""Vectors of queries on the disk: a query that one run has encoded, no run has to encode again.

The cache is a file of SQLite, which several processes may use at once. The key of a vector is its query and all that
decides its bits: the encoder's settings, and the vector that the encoder makes of a fixed sentence, PROBE. So an
encoder does not read a vector that it would compute differently because of other weights, another processor or another
number of threads, and a run gives the same with a full cache as with an empty one.
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
WAIT = 30  # seconds to wait while another process writes
COLUMNS = "id INTEGER PRIMARY KEY, key BLOB UNIQUE, vector BLOB"
OTHER_TABLES = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT IN ('queries', 'sqlite_stat1')"
# What an SQL query selects to get the number of the file's bytes that are in use.
USED = "(page_count - freelist_count) * page_size FROM pragma_page_count, pragma_freelist_count, pragma_page_size"


class QueryCache:
    """The file of the vectors, with up to `limit_mib` MiB: beyond that the oldest are deleted. Threads may share it."""

    def __init__(self, path: str | Path, limit_mib: int):
        """Raises R3LiteError if the file is no such cache, and OSError if nothing can be written into its folder."""
        self.path = Path(path).expanduser()
        self.limit = limit_mib << 20  # bytes
        self.queries = 0  # number of queries since the last call of `metrics`
        self.hits = 0  # number of those that were in the file
        self._lock = threading.Lock()
        self._working = True
        check_writable(self.path.absolute().parent)
        if self.path.exists():
            check_regular(self.path, "Pass a file for --query-cache.")
        with explained(
            sqlite3.Error, f"--query-cache {path} cannot be used", "Pass another file.", code="query-cache-unusable"
        ):
            self._file = sqlite3.connect(self.path, WAIT, isolation_level="IMMEDIATE", check_same_thread=False)
            # Vectors that a power cut loses are encoded again.
            self._file.execute("PRAGMA synchronous = OFF")
            # Deleting queries would never bring the file of another program below the limit.
            if self._file.execute(OTHER_TABLES).fetchone():
                raise sqlite3.DatabaseError("it is another program's database")
            self._file.execute(f"CREATE TABLE IF NOT EXISTS queries ({COLUMNS})")

    def vectors(self, keys: list[bytes], make: Callable[[int], np.ndarray]) -> list[np.ndarray]:
        """Returns the vector of each key.

        It is read from the file. If `keys[i]` is not in the file, its vector is `make(i)`, which is added to the file.
        """
        with self._lock:
            cached = self._try_file(lambda: [self._read(key) for key in keys])
            if cached is None:
                cached = [None] * len(keys)
            new = {i: make(i) for i, vector in enumerate(cached) if vector is None}
            self.queries += len(keys)
            self.hits += len(keys) - len(new)
            if new:
                rows = [(keys[i], vector.tobytes()) for i, vector in new.items()]
                self._try_file(lambda: self._write(rows))
            return [new.get(i, vector) for i, vector in enumerate(cached)]

    def metrics(self) -> dict[str, float]:
        """Returns metrics of the queries since the last call, and begins to count anew; none if there was no query."""
        with self._lock:
            metrics = {}
            if self.queries:
                metrics["queries/cached_ratio"] = self.hits / self.queries
            self.queries = 0
            self.hits = 0
            return metrics

    def line(self) -> str:
        """Returns the metrics in words. Like `metrics`, it begins to count anew."""
        queries = self.queries
        share = self.metrics().get("queries/cached_ratio", 0.0)
        return f"{share:.0%} of {queries} queries were cached in {self.path}"

    def _read(self, key: bytes) -> np.ndarray | None:
        row = self._file.execute("SELECT vector FROM queries WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        return np.frombuffer(row[0], "<f4")

    def _write(self, rows: list[tuple[bytes, bytes]]) -> None:
        oldest = "SELECT id FROM queries ORDER BY id LIMIT 1 + (SELECT COUNT(*) FROM queries) / 10"
        with self._file:  # one transaction
            self._file.executemany("INSERT OR REPLACE INTO queries (key, vector) VALUES (?, ?)", rows)
            while self._file.execute(f"SELECT {USED}").fetchone()[0] > self.limit:
                # A tenth at a time, so that not every query deletes.
                self._file.execute(f"DELETE FROM queries WHERE id IN ({oldest})")

    def _try_file(self, work: Callable):
        """Returns the result of `work`, which uses the file.

        If it fails, prints a warning; from then on returns None, and the file is not used any more.
        """
        if not self._working:
            return None
        try:
            return work()
        except sqlite3.Error as error:
            self._working = False
            print(f"warning: continuing without --query-cache {self.path}: {error}", file=sys.stderr)
            return None


class CachedEncoder:
    """An encoder whose queries go through a cache.

    A query that is not in the cache is encoded alone: in a batch, the last bits of its vector would depend on the other
    queries.
    """

    def __init__(self, encoder: Encoder, cache: QueryCache):
        self.encoder = encoder
        self.cache = cache
        self.dimension = encoder.dimension
        self.settings = encoder.settings
        settings = json.dumps(encoder.settings, sort_keys=True).encode()
        probe = encoder.encode_queries([PROBE]).tobytes()
        self._identity = hashlib.sha256(settings + probe).digest()

    def encode_queries(self, queries: list[str]) -> np.ndarray:
        keys = [hashlib.sha256(self._identity + query.encode()).digest() for query in queries]

        def encode(i: int) -> np.ndarray:
            return self.encoder.encode_queries([queries[i]])[0]

        vectors = self.cache.vectors(keys, encode)
        if not vectors:
            return np.empty((0, self.dimension), np.float32)
        return np.stack(vectors)

    def encode_passages(
        self,
        documents: list[Document],
        advance: Callable[[int], object],
    ) -> np.ndarray:
        return self.encoder.encode_passages(documents, advance)
