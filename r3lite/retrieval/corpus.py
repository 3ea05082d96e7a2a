"""Corpora: passages read from JSON lines, gathered from the paragraphs that come with questions, or kept in an index
folder, and read from the disk there when they are asked for.

Owns the spellings of a passage's fields, the fingerprint of a corpus, and two files of an index folder:
`passages.jsonl`, and `ends.bin`, the byte offsets at which the lines of `passages.jsonl` end (int64, little-endian). A
passage's place is the index of its line; a deleted passage keeps its place, so that no other one moves. Knows nothing
of encoders and vectors.
"""

import copy
import hashlib
import json
import mmap
import os
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from r3lite.core.bars import BRIEF
from r3lite.core.episode import Document, Question, metadata_of
from r3lite.core.errors import R3LiteError, explained
from r3lite.core.files import check_regular, open_regular, parse_at_place, read_jsonl
from r3lite.core.records import InvalidRecord, Record, Source

PASSAGES = "passages.jsonl"
ENDS = "ends.bin"
SKIPPING = "--skip-bad-rows skips bad lines."
REMEDY = 'Each line is an object such as {"id": "7", "title": "Blue Harbor", "text": "Blue Harbor is a film ..."}.'


def read_corpus(path: str | Path, skip_bad_rows: bool = False) -> list[Document]:
    """Returns the passages of a JSONL file, as `stream_corpora` yields them."""
    return list(stream_corpora([path], skip_bad_rows))


def stream_corpora(paths: Iterable[str | Path], skip_bad_rows: bool = False) -> Iterator[Document]:
    """Yields the passages of JSONL files, in their order.

    One passage at a time is in memory, and all ids, since no id may occur twice.

    A bad line raises R3LiteError with file, line and reason; with `skip_bad_rows` bad lines are left out and their
    number is printed. A file without a passage raises R3LiteError, too. The fields are `id`, `title`, `text` and
    `metadata`. BEIR's `_id` may stand for `id`, and Pyserini's `contents` for `text`. The first line of `contents` is
    the title if there is no `title` and more lines follow.
    """
    ids: set[str] = set()
    for path in paths:
        count = 0
        bad: list[InvalidRecord] = []
        skip = bad.append if skip_bad_rows else None
        for record in read_jsonl(path, f"{REMEDY} {SKIPPING}", skip):
            try:
                document = _document(record)
                if document.id in ids:
                    raise record.error(f"duplicate id {document.id!r}")
            except InvalidRecord as error:
                if not skip_bad_rows:
                    raise
                bad.append(error)
                continue
            ids.add(document.id)
            count += 1
            yield document
        if bad:
            print(f"{path}: skipped {len(bad)} bad lines; the first: {bad[0].cause}", file=sys.stderr)
        if count == 0:
            raise no_passage(path)


def no_passage(path: str | Path) -> R3LiteError:
    """Returns the error for a corpus without a passage."""
    return R3LiteError(f"{path} contains no passage", REMEDY, code="corpus-empty")


def _document(record: Record) -> Document:
    id = record.identifier(record.first("id", "_id"))
    text = record.text(record.first("text", "contents"))
    title = record.text("title", "", blank=True)
    if "text" not in record and not title and "\n" in text:
        first_line, _, text = text.partition("\n")
        title = first_line.strip().strip('"')
        if not text.strip():
            raise record.error("contents has a title, but no text")
    return Document(id, title, text, metadata=metadata_of(record))


def count_lines(path: str) -> int:
    """Returns the number of lines of a corpus that are not blank. Raises R3LiteError if there is none."""
    with open_regular(path, REMEDY) as file:
        count = sum(1 for line in file if line.strip())
    if count == 0:
        raise no_passage(path)
    return count


def noise(question: Question, rate: float, draw: random.Random) -> list[Document]:
    """Returns the share `rate` of a question's paragraphs that are not gold, drawn at random."""
    distractors = [document for document in question.documents if question.gold_index(document) is None]
    return draw.sample(distractors, round(rate * len(distractors)))


def from_questions(questions: Iterable[Question]) -> list[Document]:
    """Returns the paragraphs that come with the questions; one that several questions share is there once."""
    unique = {}
    for question in questions:
        for document in question.documents:
            unique.setdefault((document.title, document.text), document)
    return list(unique.values())


def fingerprint(documents: Iterable[Document]) -> str:
    """Returns a hash of ids, titles, texts and metadata in their order: two corpora with the same hash are the same."""
    digest = hashlib.sha256()
    for document in tqdm(documents, desc="checking passages", unit="", **BRIEF):
        fields = [document.id, document.title, document.text, *document.metadata]
        digest.update(json.dumps(fields).encode())
    return digest.hexdigest()


class Passages(Sequence[Document]):
    """The passages of a folder that are not deleted, in their order. Threads may share it, and the files may grow."""

    def __init__(self, folder: Path, places: int | None, deleted: np.ndarray, remedy: str):
        """Takes the first `places` lines, or all if None, without the deleted ones.

        `deleted` has the places of these, sorted.
        """
        self.path = folder / PASSAGES
        self.remedy = remedy
        check_regular(self.path, remedy)  # to open a pipe would wait for ever
        self.ends = _ends(folder, places, remedy)  # [places]
        self.size = int(self.ends[-1]) if len(self.ends) else 0
        if self.path.stat().st_size < self.size:
            raise R3LiteError(f"{self.path} is shorter than when it was indexed", remedy, code="corpus-shorter")
        self._text: mmap.mmap | bytes = b""
        if self.size:
            with open(self.path, "rb") as file:
                self._text = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ)
        # The places of the passages that are not deleted.
        self.live: Sequence[int] = range(len(self.ends))
        if len(deleted):
            self.live = np.delete(np.arange(len(self.ends)), deleted)

    def __len__(self) -> int:
        return len(self.live)

    def __getitem__(self, i):
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        return self.at(int(self.live[i]))

    def only(self, mask: np.ndarray) -> "Passages":
        """Returns the passages for which `mask` [N] is true."""
        selected = copy.copy(self)
        selected.live = np.array(self.live)[mask]
        return selected

    def at(self, place: int) -> Document:
        """Returns the passage at a place, be it deleted or not."""
        where = f"{self.path}, line {place + 1}"
        start = int(self.ends[place - 1]) if place else 0
        with explained(UnicodeDecodeError, f"{where}: not UTF-8", self.remedy, code="not-utf8"):
            line = self._text[start : int(self.ends[place])].decode()
        record = Record(parse_at_place(where, self.remedy, line), Source(where, self.remedy))
        return Document.from_json(record)

    def close(self) -> None:
        """Closes the file of passages: Windows renames no file that is open."""
        if isinstance(self._text, mmap.mmap):
            self._text.close()


def _ends(folder: Path, places: int | None, remedy: str) -> np.ndarray:
    """Returns the byte offsets [places] at which the first `places` lines end; those of all lines if None.

    An older index has no `ends.bin`: all its lines are read.
    """
    path = folder / ENDS
    if path.exists():
        check_regular(path, remedy)
        count = -1 if places is None else places  # -1: all
        ends = np.fromfile(path, dtype="<i8", count=count)
    else:
        with open(folder / PASSAGES, "rb") as file:
            ends = np.cumsum([len(line) for line in file], dtype=np.int64)
    if places is not None and len(ends) != places:
        raise R3LiteError(
            f"{folder / PASSAGES} has {len(ends)} passages, but {places} were indexed", remedy, code="passages-differ"
        )
    if np.any(np.diff(ends, prepend=0) <= 0):
        raise R3LiteError(f"{path} is damaged", remedy, code="corpus-damaged")
    return ends


def write_passages(folder: Path, documents: Iterable[Document], start: int = 0) -> str:
    """Writes passages after the first `start` places of a folder; returns the fingerprint of those written.

    Lines after these places are cut off first: a write that was killed left them. One passage is in memory at a time.
    """
    ends = _ends(folder, start, "") if start else np.empty(0, np.int64)
    size = int(ends[-1]) if start else 0
    with open(folder / PASSAGES, "ab") as texts, open(folder / ENDS, "ab") as line_ends:
        if not line_ends.tell() and start:  # an older index has no ends.bin
            line_ends.write(ends.astype("<i8").tobytes())
        texts.truncate(size)
        line_ends.truncate(8 * start)  # 8 bytes are an int64
        written_fingerprint = fingerprint(_write_each(documents, texts=texts, line_ends=line_ends, size=size))
        for file in (texts, line_ends):
            file.flush()
            os.fsync(file.fileno())
    return written_fingerprint


def _write_each(documents: Iterable[Document], texts, line_ends, size: int) -> Iterator[Document]:
    """Writes each passage to `texts` and where its line ends to `line_ends`, and yields it then.

    `texts` has `size` bytes at the start.
    """
    for document in documents:
        line = json.dumps(document.to_json(), ensure_ascii=False).encode() + b"\n"
        size += texts.write(line)
        line_ends.write(size.to_bytes(8, "little"))
        yield document
