"""Rows: JSON, JSON lines, CSV and TSV. Each row is a section."""

import csv
import io
import itertools
import re
from collections.abc import Iterator
from typing import Any

from r3lite.core.records import InvalidRecord, number_text, parse
from r3lite.retrieval.documents.section import Section, Unreadable

DELIMITERS = ",;\t"
SEPARATOR = re.compile(r'"?sep=([^\w"\r\n])"?(?:\r\n?|\n)', re.IGNORECASE)
TITLES, TEXTS = ("title", "name", "heading"), ("text", "contents", "content", "body")


def read_json(text: str, name: str) -> Iterator[Section]:
    """A section for each item of a list, or one for anything else."""
    value = _parsed(text, "")
    return map(_section, value if isinstance(value, list) else [value])


def read_jsonl(text: str, name: str) -> Iterator[Section]:
    """A section for each line that is not blank."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _section(_parsed(line, f"line {number}: "))


def read_csv(text: str, name: str) -> Iterator[Section]:
    """A section for each row under the first one, which names the columns.

    Cells stand between commas, or between semicolons or tabs, as spreadsheets write where the comma is in numbers;
    or between what a line such as `sep=|` above them says, as Excel reads it.
    """
    if named := SEPARATOR.match(text):
        return read_table(text[named.end() :], name, delimiter=named[1])
    return read_table(text, name, delimiter=max(DELIMITERS, key=lambda delimiter: _fits(text, delimiter)))


def _fits(text: str, delimiter: str) -> tuple[bool, int]:
    """Whether the first rows have equally many columns, more than one; and how many the header has."""
    try:
        widths = [len(row) for row in _rows(text, 20, delimiter=delimiter)] or [0]
    except csv.Error:
        return False, 0
    return set(widths) == {widths[0]} and widths[0] > 1, widths[0]


def read_table(text: str, name: str, **dialect: Any) -> Iterator[Section]:
    """A section for each row under the first one, which names the columns. Several may have one name, or none."""
    try:
        rows = _rows(text, strict=True, **dialect)
    except csv.Error as error:
        raise Unreadable("not a table", str(error)) from error
    for row in rows[1:]:
        yield _of_columns(list(itertools.zip_longest(rows[0], row, fillvalue="")))


def _rows(text: str, most: int | None = None, **dialect: Any) -> list[list[str]]:
    """The first rows, without blank ones."""
    limit = csv.field_size_limit(len(text))  # of the process; cells of more than 131,072 characters would be errors
    try:
        rows = csv.reader(io.StringIO(text, newline=""), **dialect)
        return [row for row in itertools.islice(rows, most) if row]
    finally:
        csv.field_size_limit(limit)


def _parsed(text: str, where: str) -> Any:
    try:
        return parse(text)
    except InvalidRecord as error:
        raise Unreadable("not JSON", where + error.cause) from error


def _section(row: Any) -> Section:
    """An object as a row with its keys as columns; anything else as lines."""
    if isinstance(row, dict):
        return _of_columns(list(row.items()))
    return Section("\n".join(_lines(row)))


def _of_columns(row: list[tuple[str, Any]]) -> Section:
    """The title and the text of a row that has a text; else all of it, a line `key: value` for each value."""
    text = "\n".join(_texts(row, TEXTS)) or "\n".join(line for key, value in row for line in _lines(value, key))
    return Section(text, next(iter(_texts(row, TITLES)), ""))


def _texts(row: list[tuple[str, Any]], names: tuple[str, ...]) -> list[str]:
    """The values that are texts and not blank under the first of the names, in any case, that has one."""
    for name in names:
        of_name = [value for key, value in row if key.strip().lower() == name]
        if texts := [value for value in of_name if isinstance(value, str) and value.strip()]:
            return texts
    return []


def _lines(value: Any, key: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _lines(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _lines(inner, key)
    elif value is not None and str(value).strip():
        text = number_text(value) if type(value) is float else str(value)
        yield f"{key}: {text}" if key else text
