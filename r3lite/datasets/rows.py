"""Rows of data files: JSON array, JSON lines and parquet, recognised by their first bytes, and tables (CSV, TSV),
recognised by the ending of their names. Knows no meaning of a row."""

import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tqdm import tqdm

from r3lite.core.bars import BRIEF
from r3lite.core.errors import R3LiteError, explained, extra
from r3lite.core.files import open_regular, read_jsonl, read_text
from r3lite.core.records import InvalidRecord, Record, Source, end_of, parse, parse_at
from r3lite.core.tables import TABLES, rows_of_file
from r3lite.datasets import hub
from r3lite.settings.data import DATA_REMEDY

if TYPE_CHECKING:
    import pyarrow

JSON_SPACE = re.compile(r"[ \t\r\n]*")
JSON_NAMES = (".json", ".jsonl")
# Types of parquet columns that may have values that JSON cannot express: NaN, dates, bytes, decimal numbers.
BEYOND_JSON = re.compile("float|double|time|date|duration|binary|decimal")
# Remedies.
MEND = "Fix or remove the row, or pass --skip-bad-rows."
SAVE_AS_CSV = "Save it as CSV in UTF-8 with the names of the columns in its first line, such as question,answer."
ROWS_OF_TABLE = "Its first line has the names of the columns, such as question,answer; each further line is a row."

Item = TypeVar("Item")


def converted_rows(
    data: str | Path,
    convert: Callable[[Record, str], Item | None],
    limit: int | None,
    skip_bad_rows: bool,
    needed: str = "",
    remedy: str = "",
) -> list[Item]:
    """Returns what `convert(row, default id)` makes of the rows of a path or hub string, up to `limit` items.

    A row for which `convert` returns None is left out. A bad row raises InvalidRecord with file, line (or row) and
    reason; with `skip_bad_rows` bad rows are left out and their number is printed. Raises R3LiteError with the `remedy`
    if there is no row. With `needed`, a description of a row for the message, it is also raised if no row is left.
    """
    converted: list[Item] = []
    bad: list[InvalidRecord] = []
    is_empty = True

    def on_bad(error: InvalidRecord) -> None:
        bad.append(error)
        if not skip_bad_rows:
            raise error

    rows = ((path, row) for path in hub.files_of(str(data)) for row in file_rows(path, on_bad))
    for path, row in tqdm(rows, f"reading {data}", unit=" rows", **BRIEF):
        is_empty = False
        number = row.source.where.split()[-1]  # `where` is such as `dev.json, row 3`
        try:
            item = convert(row, f"{path.stem}-{number}")
        except InvalidRecord as error:
            on_bad(error)
            continue
        if item is not None:
            converted.append(item)
        if len(converted) == limit:
            break
    if bad:
        print(f"{data}: skipped {len(bad)} bad rows; the first: {bad[0].cause}", file=sys.stderr)
    if is_empty and not bad:
        if Path(data).suffix.lower() in TABLES:
            remedy = ROWS_OF_TABLE
        raise R3LiteError(f"{data} is empty: it has no row", remedy or DATA_REMEDY, code="no-rows")
    if needed and not converted:
        raise R3LiteError(f"{data} has no usable {needed}", remedy, code="no-usable-rows")
    return converted


def file_rows(path: Path, on_bad: Callable[[InvalidRecord], None]) -> Iterator[Record]:
    """Yields the rows of a file, each with its place (`line 3`, `row 7`); calls `on_bad` with the error of a bad row.

    A syntax error in an array raises in any case: nothing after it can be read.
    """
    with open_regular(path, DATA_REMEDY) as file:
        head = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")  # without UTF-8's byte order mark and white space
    suffix = path.suffix.lower()
    if head.startswith(b"PAR1"):
        yield from _parquet_rows(path, on_bad)
    elif suffix in TABLES:
        yield from _table_rows(path, on_bad)
    elif head.startswith(b"["):
        yield from _array_rows(path, on_bad)
    elif head.startswith(b"{") or not head or suffix in JSON_NAMES:
        yield from read_jsonl(path, MEND, on_bad)
    else:
        raise R3LiteError(
            f"{path} is neither JSON, JSON lines nor parquet, and its name does not end in .csv or .tsv",
            f"{SAVE_AS_CSV} Or write a line of JSON for each row.",
            code="data-format-unknown",
        )


def _table_rows(path: Path, on_bad: Callable[[InvalidRecord], None]) -> Iterator[Record]:
    """Yields the rows of a CSV or TSV file, without empty cells. Its first line names the keys, in any letter case."""
    rows = rows_of_file(read_text(path, SAVE_AS_CSV), path.suffix.lower(), str(path), SAVE_AS_CSV)
    names = []
    if rows:
        names = [name.strip().lower() for name in rows[0]]
    for name in names:
        if name and names.count(name) > 1:
            raise R3LiteError(f"{path} has {names.count(name)} columns named {name}", SAVE_AS_CSV, code="column-twice")
    remedy = MEND
    if "question" not in names:
        remedy = f"The first line must name the columns, such as question,answer. {MEND}"
    for number, cells in enumerate(rows[1:], 1):
        padded = list(itertools.zip_longest(names, cells, fillvalue=""))
        blank_names = [name for name, cell in padded if name and not cell.strip()]
        remedy_of_row = remedy
        if blank_names:
            remedy_of_row = f"Empty in this row: {', '.join(blank_names)}. {remedy}"
        source = Source(f"{path}, row {number}", remedy_of_row)
        if len(cells) > len(names):
            cause = f"{source.where}: {len(cells)} cells, but {len(names)} columns"
            on_bad(InvalidRecord(cause, f"Put cells with commas in quotation marks. {MEND}", code="bad-row"))
            continue
        yield Record({name: cell for name, cell in padded if name and cell.strip()}, source)


def _array_rows(path: Path, on_bad: Callable[[InvalidRecord], None]) -> Iterator[Record]:
    """Yields the elements of a JSON array, decoded one at a time: HotpotQA's is half a gigabyte."""
    with explained(
        (OSError, UnicodeDecodeError), f"{path} cannot be read", "Pass a UTF-8 JSON file.", code="data-unreadable"
    ):
        text = path.read_text(encoding="utf-8-sig")  # of any size, unlike files.read_text
    number = 0
    place = _after_space(text, text.index("[") + 1)
    while text[place : place + 1] != "]":
        number += 1
        where = f"{path}, row {number}"
        if place >= len(text):
            raise R3LiteError(
                f"{path} ends in row {number}, without the closing ]",
                "Download the file again.",
                code="array-truncated",
            )
        problem = None
        try:
            value, end = parse_at(text, place)
            if not isinstance(value, dict):
                problem = "not a JSON object"
        except InvalidRecord as error:
            problem = error.cause
            end = end_of(text, place)
            if end is None:
                raise R3LiteError(
                    f"{where}: {problem}", "Fix the row, or download the file again.", code="bad-array-row"
                ) from error
        if problem is None:
            yield Record(value, Source(where, MEND))
        else:
            on_bad(InvalidRecord(f"{where}: {problem}", MEND, code="bad-row"))
        place = _after_space(text, end)
        if text[place : place + 1] == ",":
            place = _after_space(text, place + 1)
        elif place < len(text) and text[place] != "]":
            raise R3LiteError(
                f"{where}: a comma is missing after it", "Fix the file, or download it again.", code="array-comma"
            )
    if text[place + 1 :].strip():
        raise R3LiteError(
            f"{path}: extra data after the end of the array", "A file must contain one array.", code="array-trailing"
        )


def _after_space(text: str, place: int) -> int:
    """Returns the index of the first character at or after `place` that is not JSON's white space."""
    return JSON_SPACE.match(text, place).end()


def _parquet_rows(path: Path, on_bad: Callable[[InvalidRecord], None]) -> Iterator[Record]:
    """Yields the rows of a parquet file.

    Version 5 of the package `datasets` stores values of mixed types, as in HotpotQA's supporting facts, as JSON texts,
    in columns or lists of the type arrow.json.
    """
    with extra("hub", f"the parquet file {path}"):
        import pyarrow.parquet
    failures = (pyarrow.ArrowException, OSError)
    with explained(
        failures, f"{path} cannot be read as parquet", "Download the file again.", code="parquet-unreadable"
    ):
        file = pyarrow.parquet.ParquetFile(path)
        beyond_json = [field.name for field in file.schema_arrow if BEYOND_JSON.search(str(field.type))]
        json_fields = [field for field in file.schema_arrow if _has_json(field)]
        batches = file.iter_batches(batch_size=256)
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, row in enumerate(rows, 1):
            source = Source(f"{path}, row {number}", MEND)
            row |= {name: _in_json(row[name]) for name in beyond_json}
            try:
                decoded = {field.name: _decoded(row[field.name], field) for field in json_fields}
            except InvalidRecord as error:
                on_bad(InvalidRecord(f"{source.where}: {error.cause}", MEND, code=error.code))
                continue
            yield Record(row | decoded, source)


def _in_json(value: Any) -> Any:
    """Returns a value as JSON can have it: dates and decimal numbers as text; None for NaN and infinity."""
    text = json.dumps(value, default=_text_of)
    return json.loads(text, parse_constant=lambda _: None)


def _text_of(value: Any) -> str | None:
    """Returns a date, a decimal number or bytes in UTF-8 as text; None for other bytes, such as an image."""
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _is_json(field: "pyarrow.Field") -> bool:
    """Returns whether the values of a field are JSON texts, also if this pyarrow does not know the type arrow.json."""
    type_name = getattr(field.type, "extension_name", None)
    name_in_metadata = (field.metadata or {}).get(b"ARROW:extension:name")
    return type_name == "arrow.json" or name_in_metadata == b"arrow.json"


def _parts(field: "pyarrow.Field") -> list["pyarrow.Field"]:
    """Returns the fields of a struct, or the one field of a list's elements; [] for other types."""
    if hasattr(field.type, "value_field"):  # a list
        return [field.type.value_field]
    if hasattr(field.type, "get_field_index"):  # a struct
        return [field.type.field(i) for i in range(field.type.num_fields)]
    return []


def _has_json(field: "pyarrow.Field") -> bool:
    """Returns whether a field, or a field at any depth in it, has JSON texts."""
    return _is_json(field) or any(map(_has_json, _parts(field)))


def _decoded(value: Any, field: "pyarrow.Field") -> Any:
    """Returns a value of a parquet file with its JSON texts read; raises InvalidRecord if one is not JSON."""
    if value is None:
        return None
    if _is_json(field):
        return parse(value)
    if isinstance(value, list):
        (element,) = _parts(field)
        return [_decoded(item, element) for item in value]
    if isinstance(value, dict):
        return {part.name: _decoded(value[part.name], part) for part in _parts(field)}
    return value
