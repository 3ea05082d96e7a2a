"""Plain text: one section without a title."""

from collections.abc import Iterator

from r3lite.retrieval.documents.section import Section


def read(text: str, name: str) -> Iterator[Section]:
    yield Section(text)
