"""Passages in an index folder: written once, one a line, and read from the disk when they are asked for.

Owns `passages.jsonl` and `ends.bin`, which says where each line ends (int64, little-endian). A passage's place is the
number of its line; a deleted passage keeps its place, so that no other one moves.
"""

import copy
import json
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from r3lite.core.episode import Document
from r3lite.core.errors import R3LiteError
from r3lite.core.files import check_regular, within
from r3lite.core.records import Record, Source
from r3lite.retrieval.corpus import fingerprint

PASSAGES, ENDS = "passages.jsonl", "ends.bin"


class Passages(Sequence[Document]):
    """The passages of a folder that are not deleted, in their order. Safe in threads; the files may grow meanwhile."""

    def __init__(self, folder: Path, places: int | None, deleted: np.ndarray, remedy: str):
        """The first `places` lines without those in `deleted` (sorted); all lines if `places` is None."""
        self.path, self.remedy = folder / PASSAGES, remedy
        check_regular(self.path, remedy)  # it would wait for a pipe for ever
        self.ends = _ends(folder, places, remedy)
        self.size = int(self.ends[-1]) if len(self.ends) else 0
        if self.path.stat().st_size < self.size:
            raise R3LiteError(f"{self.path} is shorter than it was when it was indexed", remedy)
        with open(self.path, "rb") as file:
            self._text = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ) if self.size else b""
        places = len(self.ends)
        self.live: Sequence[int] = np.delete(np.arange(places), deleted) if len(deleted) else range(places)

    def __len__(self) -> int:
        return len(self.live)

    def __getitem__(self, i):
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        return self.at(int(self.live[i]))

    def only(self, fit: np.ndarray) -> "Passages":
        """Those of the passages for which `fit` [N] is true."""
        kept = copy.copy(self)
        kept.live = np.array(self.live)[fit]
        return kept

    def at(self, place: int) -> Document:
        """The passage at a place, be it deleted or not."""
        where = f"{self.path}, line {place + 1}"
        start = int(self.ends[place - 1]) if place else 0
        try:
            line = self._text[start : int(self.ends[place])].decode()
        except UnicodeDecodeError as error:
            raise R3LiteError(f"{where}: not UTF-8: {error}", self.remedy) from error
        return Document.from_json(Record(within(where, self.remedy, line), Source(where, self.remedy)))

    def close(self) -> None:
        """Lets go of the files, which Windows renames only then."""
        if isinstance(self._text, mmap.mmap):
            self._text.close()


def _ends(folder: Path, places: int | None, remedy: str) -> np.ndarray:
    """Where the lines end [places]; of an older index, which did not keep it, by reading all of them."""
    path = folder / ENDS
    if path.exists():
        check_regular(path, remedy)
        ends = np.fromfile(path, dtype="<i8", count=-1 if places is None else places)
    else:
        with open(folder / PASSAGES, "rb") as file:
            ends = np.cumsum([len(line) for line in file], dtype=np.int64)
    if places is not None and len(ends) != places:
        raise R3LiteError(f"{folder / PASSAGES} holds {len(ends)} passages, {places} were indexed", remedy)
    if np.any(np.diff(ends, prepend=0) <= 0):
        raise R3LiteError(f"{path} is damaged", remedy)
    return ends


def write_passages(folder: Path, documents: Iterable[Document], after: int = 0) -> str:
    """Writes passages behind the first `after` places of a folder; returns the fingerprint of those written.

    What is behind these places already, which nothing refers to, is cut off. One passage is in memory at a time.
    """
    ends = _ends(folder, after, "") if after else np.empty(0, np.int64)
    size = int(ends[-1]) if after else 0
    with open(folder / PASSAGES, "ab") as texts, open(folder / ENDS, "ab") as marks:
        if not marks.tell() and after:  # an older index, which did not keep them
            marks.write(ends.astype("<i8").tobytes())
        texts.truncate(size)
        marks.truncate(8 * after)
        value = fingerprint(_written(documents, texts, marks, size))
        for file in (texts, marks):
            file.flush()
            os.fsync(file.fileno())
    return value


def _written(documents: Iterable[Document], texts, marks, size: int) -> Iterator[Document]:
    for document in documents:
        line = json.dumps(document.to_json(), ensure_ascii=False).encode() + b"\n"
        size += texts.write(line)
        marks.write(size.to_bytes(8, "little"))
        yield document
