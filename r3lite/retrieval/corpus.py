"""Corpora: passages read from JSON lines, or gathered from the paragraphs that come with questions.

Owns the spellings of a passage's fields and the fingerprint of a corpus; knows nothing of encoders and indexes.
"""

import hashlib
import json
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tqdm import tqdm

from r3lite.core.bars import BRIEF
from r3lite.core.episode import Document, Question, metadata_of
from r3lite.core.errors import R3LiteError
from r3lite.core.files import open_regular, read_jsonl
from r3lite.core.records import InvalidRecord, Record

REMEDY = 'Each line is an object such as {"id": "7", "title": "Blue Harbor", "text": "Blue Harbor is a film ..."}.'


def read_corpus(path: str | Path, skip_bad_rows: bool = False) -> list[Document]:
    """The passages of a JSONL file, as `stream_corpora` gives them."""
    return list(stream_corpora([path], skip_bad_rows))


def stream_corpora(paths: Iterable[str | Path], skip_bad_rows: bool = False) -> Iterator[Document]:
    """The passages of JSONL files, in their order; besides one passage, all ids are in memory, as none may come twice.

    A bad line raises R3LiteError with file, line and reason; with `skip_bad_rows` bad lines are left out and their
    number is printed. Besides `id`, `title`, `text`, it reads BEIR's `_id` and Pyserini's `contents`, whose first line
    is the title, and `metadata`.
    """
    seen: set[str] = set()
    for path in paths:
        before = len(seen)
        yield from _stream(path, skip_bad_rows, seen)
        if len(seen) == before:
            raise R3LiteError(f"{path} contains no passage", REMEDY)


def _stream(path: str | Path, skip_bad_rows: bool, seen: set[str]) -> Iterator[Document]:
    bad: list[InvalidRecord] = []
    on_bad = bad.append if skip_bad_rows else None
    for record in read_jsonl(path, f"{REMEDY} --skip-bad-rows leaves bad ones out.", on_bad):
        try:
            document = _document(record)
            if document.id in seen:
                raise record.error(f"an earlier line has the id {document.id!r}, too")
        except InvalidRecord as error:
            bad.append(error)
            if not skip_bad_rows:
                raise
            continue
        seen.add(document.id)
        yield document
    if bad:
        print(f"{path}: {len(bad)} bad lines skipped; the first: {bad[0].cause}", file=sys.stderr)


def _document(record: Record) -> Document:
    id, text = record.identifier(record.first("id", "_id")), record.text(record.first("text", "contents"))
    title = record.text("title", "", blank=True)
    if "text" not in record and not title and "\n" in text:
        first, _, text = text.partition("\n")
        title = first.strip().strip('"')
        if not text.strip():
            raise record.error("nothing follows the title in contents")
    return Document(id, title, text, metadata=metadata_of(record))


def count_lines(path: str) -> int:
    """Lines of a file that are not blank."""
    with open_regular(path, REMEDY) as file:
        return sum(1 for line in file if line.strip())


def noise(question: Question, rate: float, draw: random.Random) -> list[Document]:
    """So great a share of a question's paragraphs that are not gold, drawn at random."""
    others = [d for d in question.documents if question.gold_index(d) is None]
    return draw.sample(others, round(rate * len(others)))


def from_questions(questions: Iterable[Question]) -> list[Document]:
    """The paragraphs that come with the questions; one that several questions share is there once."""
    unique = {}
    for question in questions:
        for document in question.documents:
            unique.setdefault((document.title, document.text), document)
    return list(unique.values())


def fingerprint(documents: Iterable[Document]) -> str:
    """A hash of ids, titles, texts and metadata in their order: two corpora with the same one are the same."""
    digest = hashlib.sha256()
    for d in tqdm(documents, desc="checking passages", unit="", **BRIEF):
        digest.update(json.dumps([d.id, d.title, d.text, *d.metadata]).encode())
    return digest.hexdigest()
