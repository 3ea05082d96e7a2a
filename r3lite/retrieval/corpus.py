"""Corpora: passages read from JSON lines, or gathered from the paragraphs that come with questions.

Owns the spellings of a passage's fields and the fingerprint of a corpus; knows nothing of encoders and indexes.
"""

import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from r3lite.episode import Document, Question
from r3lite.errors import R3LiteError
from r3lite.files import read_jsonl

REMEDY = 'Each line is an object such as {"id": "7", "title": "Blue Harbor", "text": "Blue Harbor is a film ..."}.'


def read_corpus(path: str | Path, skip_bad_rows: bool = False) -> list[Document]:
    """The passages of a JSONL file, in its order.

    A bad line raises R3LiteError with file, line and reason; with `skip_bad_rows` bad lines are left out and their
    number is printed. Besides `id`, `title`, `text`, it reads BEIR's `_id` and Pyserini's `contents`, whose first line
    is the title.
    """
    bad: list[R3LiteError] = []

    def refuse(error: R3LiteError) -> None:
        bad.append(error)
        if not skip_bad_rows:
            raise R3LiteError(error.cause, f"{REMEDY} --skip-bad-rows leaves bad ones out.")

    documents, lines = [], {}
    for number, record in read_jsonl(path, on_bad=refuse):
        document, problem = _document(record)
        if not problem and document.id in lines:
            problem = f"the id {document.id!r} is that of line {lines[document.id]}, too"
        if problem:
            refuse(R3LiteError(f"{path}, line {number}: {problem}"))
            continue
        lines[document.id] = number
        documents.append(document)
    if bad:
        print(f"{path}: {len(bad)} bad lines skipped; the first: {bad[0].cause}", file=sys.stderr)
    if not documents:
        raise R3LiteError(f"{path} holds no passage", REMEDY)
    return documents


def _document(record: dict) -> tuple[Document | None, str]:
    """The passage of a JSON object, or what is wrong with it."""
    id, title = record.get("id", record.get("_id")), record.get("title") or ""
    text = record.get("text", record.get("contents"))
    if isinstance(id, bool) or not isinstance(id, (str, int)) or id == "":
        return None, "'id' is missing or neither text nor a whole number"
    if not isinstance(title, str):
        return None, "'title' is not text"
    if not isinstance(text, str) or not text.strip():
        return None, "'text' is missing or blank"
    if "text" not in record and not title and "\n" in text:
        first, _, text = text.partition("\n")
        title = first.strip().strip('"')
    return Document(str(id), title, text), ""


def from_questions(questions: Iterable[Question]) -> list[Document]:
    """The paragraphs that come with the questions; one that several questions share is there once."""
    unique = {}
    for question in questions:
        for document in question.documents:
            unique.setdefault((document.title, document.text), document)
    return list(unique.values())


def fingerprint(documents: Iterable[Document]) -> str:
    """A hash of ids, titles and texts in their order: two corpora with the same one are the same."""
    digest = hashlib.sha256()
    for d in documents:
        digest.update(json.dumps([d.id, d.title, d.text]).encode())
    return digest.hexdigest()
