"""Rows: JSON, JSON lines, CSV and TSV. Each row is a section."""

import csv
import io
import itertools
from collections.abc import Iterator
from typing import Any

from r3lite.core.records import InvalidRecord, number_text, parse
from r3lite.retrieval.documents.section import Section, Unreadable

DELIMITERS = ",;\t"
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
    """A section for each row under the first one, which names the columns. They stand between commas, or between
    semicolons or tabs, as spreadsheets write where the comma is in numbers."""
    return read_table(text, name, delimiter=max(DELIMITERS, key=lambda delimiter: _fits(text, delimiter)))


def _fits(text: str, delimiter: str) -> tuple[bool, int]:
    """Whether the first rows have equally many columns, more than one; and how many the header has."""
    try:
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
        widths = [len(row) for row in itertools.islice(rows, 20) if row] or [0]
    except csv.Error:
        return False, 0
    return set(widths) == {widths[0]} and widths[0] > 1, widths[0]


def read_table(text: str, name: str, **how: Any) -> Iterator[Section]:
    """A section for each row under the first one, which names the columns; `how` is the dialect."""
    try:
        yield from map(_section, csv.DictReader(io.StringIO(text, newline=""), restkey="", strict=True, **how))
    except csv.Error as error:
        raise Unreadable("not a table", str(error)) from error


def _parsed(text: str, where: str) -> Any:
    try:
        return parse(text)
    except InvalidRecord as error:
        raise Unreadable("not JSON", where + error.cause) from error


def _section(row: Any) -> Section:
    """The title and the text of a row that has a text; else all of it, a line `key: value` for each value."""
    text, title = (_first(row, TEXTS), _first(row, TITLES)) if isinstance(row, dict) else ("", "")
    return Section(text or "\n".join(_lines(row)), title)


def _first(row: dict, keys: tuple[str, ...]) -> str:
    """The first value that is a text and not blank, under one of the keys in any case; else nothing."""
    folded = {str(key).strip().lower(): value for key, value in row.items()}
    return next((v for k in keys if isinstance(v := folded.get(k), str) and v.strip()), "")


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
