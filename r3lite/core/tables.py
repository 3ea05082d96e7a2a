"""Tables as text: CSV and TSV, as programs and spreadsheets write them. Knows no meaning of a column."""

import csv
import io
import itertools
import re
from csv import QUOTE_NONE
from typing import Any

from r3lite.core.errors import explained

DELIMITERS = ",;\t"
SEPARATOR = re.compile(r'"?sep=([^\w"\r\n])"?(?:\r\n?|\n)', re.IGNORECASE)
TSV = {"delimiter": "\t", "quoting": QUOTE_NONE}  # quotation marks have no meaning there
TABLES = (".csv", ".tsv")


def csv_rows(text: str) -> list[list[str]]:
    """Returns the rows of a CSV text, without blank ones; raises csv.Error if the text is not CSV.

    Cells stand between commas, or between semicolons or tabs, which spreadsheets write where numbers have a decimal
    comma. A line such as `sep=|` above the rows names another character, as Excel reads it.
    """
    separator = SEPARATOR.match(text)
    if separator:
        return table_rows(text[separator.end() :], strict=True, delimiter=separator[1])
    delimiter = max(DELIMITERS, key=lambda delimiter: _fit(text, delimiter))
    return table_rows(text, strict=True, delimiter=delimiter)


def rows_of_file(text: str, suffix: str, name: str, remedy: str) -> list[list[str]]:
    """Returns the rows of a file's text; `suffix`, the end of the file's name, is one of TABLES.

    Raises R3LiteError if the text is not a table.
    """
    with explained(csv.Error, f"{name} is not a table", remedy, code="not-a-table"):
        if suffix == ".tsv":
            return table_rows(text, strict=True, **TSV)
        return csv_rows(text)


def _fit(text: str, delimiter: str) -> tuple[bool, int]:
    """Returns how well a delimiter fits a text, as a key for `max`: the larger, the better.

    The first part of the key tells whether the first 20 rows all have the same number of columns, more than one. The
    second is the number of columns of the first row.
    """
    try:
        widths = [len(row) for row in table_rows(text, 20, delimiter=delimiter)]
    except csv.Error:
        return False, 0
    if not widths:
        return False, 0
    header = widths[0]
    is_table = set(widths) == {header} and header > 1
    return is_table, header


def table_rows(text: str, count: int | None = None, **dialect: Any) -> list[list[str]]:
    """Returns the first `count` rows, or all, without blank ones; `dialect` is as for csv.reader."""
    # A cell longer than the limit of the process, by default 131,072 characters, is an error. No cell is longer than
    # the whole text, so the text's length is the limit here.
    process_limit = csv.field_size_limit(len(text))
    try:
        rows = csv.reader(io.StringIO(text, newline=""), **dialect)
        return [row for row in itertools.islice(rows, count) if row]
    finally:
        csv.field_size_limit(process_limit)
