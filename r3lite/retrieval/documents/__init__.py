"""Makes passages from a folder of a user's own documents. Each layout, such as HTML, has a module here."""

from collections.abc import Callable, Iterator
from typing import Any

from r3lite.retrieval.documents import html, markdown, pdf, python, rows
from r3lite.retrieval.documents.section import DocumentSection

BINARY = (".pdf",)  # files that are read from bytes and not from text
# By the suffix of a file's name: a function that makes sections from the file's content and its path in the folder.
READERS: dict[str, Callable[[Any, str], Iterator[DocumentSection]]] = {
    ".txt": lambda text, name: iter([DocumentSection(text)]),
    ".md": markdown.read,
    ".markdown": markdown.read,
    ".html": html.read,
    ".htm": html.read,
    ".json": rows.read_json,
    ".jsonl": rows.read_jsonl,
    ".csv": rows.read_csv,
    ".tsv": rows.read_tsv,
    ".py": python.read,
    ".pdf": pdf.read,
}
