"""Rows: JSON, JSON lines, CSV and TSV. Each row is a section."""

import csv
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from r3lite.core import tables
from r3lite.core.records import InvalidRecord, number_text, parse
from r3lite.retrieval.documents.section import DocumentSection, Unreadable

Row = list[tuple[str, Any]]  # names of columns and values
TITLES = ("title", "name", "heading")
TEXTS = ("text", "contents", "content", "body")


def read_json(text: str, name: str) -> Iterator[DocumentSection]:
    """Returns a section for each item of a list, or one for anything else."""
    value = _parsed(text, "")
    items = value if isinstance(value, list) else [value]
    return map(_section, items)


def read_jsonl(text: str, name: str) -> Iterator[DocumentSection]:
    """Yields a section for each line that is not blank."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _section(_parsed(line, f"line {number}: "))


def read_csv(text: str, name: str) -> Iterator[DocumentSection]:
    """Yields a section for each row under the first one, which names the columns."""
    return _read_table(text, tables.csv_rows)


def read_tsv(text: str, name: str) -> Iterator[DocumentSection]:
    """Yields a section for each row under the first one, which names the columns; tabs stand between cells."""
    return _read_table(text, partial(tables.table_rows, strict=True, **tables.TSV))


def _read_table(text: str, rows_of: Callable[[str], list[list[str]]]) -> Iterator[DocumentSection]:
    """Yields a section for each row under the first one. Several columns may have one name, or none."""
    try:
        rows = rows_of(text)
    except csv.Error as error:
        raise Unreadable("not a table", str(error)) from error
    for row in rows[1:]:
        columns = itertools.zip_longest(rows[0], row, fillvalue="")
        yield _of_columns(list(columns))


def _parsed(text: str, where: str) -> Any:
    try:
        return parse(text)
    except InvalidRecord as error:
        raise Unreadable("not JSON", where + error.cause) from error


def _section(row: Any) -> DocumentSection:
    """Returns the section of a value: an object is a row with its keys as columns, anything else becomes lines."""
    if isinstance(row, dict):
        return _of_columns(list(row.items()))
    return DocumentSection("\n".join(_lines(row)))


def _of_columns(row: Row) -> DocumentSection:
    """Returns the section of a row: its title, and its text or, without a text, a line `key: value` for each value."""
    lines = _texts(row, TEXTS)
    if not lines:
        lines = [line for key, value in row for line in _lines(value, key)]
    titles = _texts(row, TITLES)
    title = titles[0] if titles else ""
    return DocumentSection("\n".join(lines), title)


def _texts(row: Row, names: tuple[str, ...]) -> list[str]:
    """Returns the non-blank texts of the columns with one name: the first of `names` that has any; [] if none has.

    The letter case of names does not matter.
    """
    for name in names:
        values = [value for key, value in row if key.strip().lower() == name]
        texts = [value for value in values if isinstance(value, str) and value.strip()]
        if texts:
            return texts
    return []


def _lines(value: Any, key: str = "") -> Iterator[str]:
    """Yields a line for each value inside a nested value, with the keys that lead to it."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _lines(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _lines(inner, key)
    elif value is not None and str(value).strip():
        text = number_text(value) if type(value) is float else str(value)
        yield f"{key}: {text}" if key else text
