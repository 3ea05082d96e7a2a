"""Rows: JSON, JSON lines, CSV and TSV. Each row is a section."""

import csv
import io
import itertools
import re
from collections.abc import Iterator
from typing import Any

from r3lite.core.records import InvalidRecord, number_text, parse
from r3lite.retrieval.documents.section import DocumentSection, Unreadable

Row = list[tuple[str, Any]]  # names of columns and values
DELIMITERS = ",;\t"
SEPARATOR = re.compile(r'"?sep=([^\w"\r\n])"?(?:\r\n?|\n)', re.IGNORECASE)
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
    """Returns a section for each row under the first one, which names the columns.

    Cells stand between commas, or between semicolons or tabs, as spreadsheets write where the comma is in numbers;
    or between what a line such as `sep=|` above them says, as Excel reads it.
    """
    separator = SEPARATOR.match(text)
    if separator:
        return read_table(text[separator.end() :], name, delimiter=separator[1])
    delimiter = max(DELIMITERS, key=lambda delimiter: _fit(text, delimiter))
    return read_table(text, name, delimiter=delimiter)


def _fit(text: str, delimiter: str) -> tuple[bool, int]:
    """Returns True if the first rows have equally many columns, more than one; and how many the header has."""
    try:
        widths = [len(row) for row in _rows(text, 20, delimiter=delimiter)]
    except csv.Error:
        return False, 0
    if not widths:
        return False, 0
    header = widths[0]
    is_table = set(widths) == {header} and header > 1
    return is_table, header


def read_table(text: str, name: str, **dialect: Any) -> Iterator[DocumentSection]:
    """Yields a section for each row under the first one, which names the columns. Several may have one name, or
    none."""
    try:
        rows = _rows(text, strict=True, **dialect)
    except csv.Error as error:
        raise Unreadable("not a table", str(error)) from error
    for row in rows[1:]:
        columns = itertools.zip_longest(rows[0], row, fillvalue="")
        yield _of_columns(list(columns))


def _rows(text: str, count: int | None = None, **dialect: Any) -> list[list[str]]:
    """Returns the first `count` rows, or all, without blank ones."""
    # The limit is of the process; without another one, cells of more than 131,072 characters would be errors.
    process_limit = csv.field_size_limit(len(text))
    try:
        rows = csv.reader(io.StringIO(text, newline=""), **dialect)
        return [row for row in itertools.islice(rows, count) if row]
    finally:
        csv.field_size_limit(process_limit)


def _parsed(text: str, where: str) -> Any:
    try:
        return parse(text)
    except InvalidRecord as error:
        raise Unreadable("not JSON", where + error.cause) from error


def _section(row: Any) -> DocumentSection:
    """Returns the section of an object as a row with its keys as columns; of anything else as lines."""
    if isinstance(row, dict):
        return _of_columns(list(row.items()))
    return DocumentSection("\n".join(_lines(row)))


def _of_columns(row: Row) -> DocumentSection:
    """Returns the title and the text of a row that has a text; else all of it, a line `key: value` for each value."""
    lines = _texts(row, TEXTS)
    if not lines:
        lines = [line for key, value in row for line in _lines(value, key)]
    titles = _texts(row, TITLES)
    title = titles[0] if titles else ""
    return DocumentSection("\n".join(lines), title)


def _texts(row: Row, names: tuple[str, ...]) -> list[str]:
    """Returns the values that are texts and not blank under the first of the names, in any case, that has one."""
    for name in names:
        values = [value for key, value in row if key.strip().lower() == name]
        texts = [value for value in values if isinstance(value, str) and value.strip()]
        if texts:
            return texts
    return []


def _lines(value: Any, key: str = "") -> Iterator[str]:
    """Yields a line for each value in a value, with the keys that lead to it."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _lines(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _lines(inner, key)
    elif value is not None and str(value).strip():
        text = number_text(value) if type(value) is float else str(value)
        yield f"{key}: {text}" if key else text
