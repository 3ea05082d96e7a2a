"""Rows of data files: JSON array, JSON lines or parquet, told apart by their first bytes. Knows no meaning of a row."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from r3lite.datasets import hub
from r3lite.errors import R3LiteError
from r3lite.files import half_pair, read_jsonl

MEND = "Mend or remove the row, or pass --skip-bad-rows."


Item = TypeVar("Item")


class BadRow(ValueError):
    """Why a row cannot be used; `converted_rows` adds the file and the line."""


def converted_rows(
    data: str | Path, convert: Callable[[dict, str], Item | None], limit: int | None = None, skip_bad_rows: bool = False
) -> list[Item]:
    """The first `limit` rows of a path or hub string as `convert(row, default id)` makes them; None leaves a row out.

    If `convert` raises BadRow, R3LiteError names file, line (or row) and reason; with `skip_bad_rows` such rows are
    left out and their number is printed.
    """
    kept: list[Item] = []
    bad: list[R3LiteError] = []
    on_bad = bad.append if skip_bad_rows else None
    rows = ((file, *placed) for file in hub.files_of(str(data)) for placed in file_rows(file, on_bad))
    for path, where, row in rows:
        try:
            made = convert(row, f"{path.stem}-{where.split()[-1]}")
        except BadRow as error:
            bad.append(R3LiteError(f"{path}, {where}: {error}", MEND))
            if not skip_bad_rows:
                raise bad[-1] from error
            continue
        kept += [] if made is None else [made]
        if len(kept) == limit:
            break
    if bad:
        print(f"{data}: {len(bad)} bad rows skipped; the first: {bad[0].cause}", file=sys.stderr)
    return kept


def file_rows(path: Path, on_bad: Callable[[R3LiteError], None] | None = None) -> Iterator[tuple[str, dict]]:
    """Place (`line 3`, `row 7`) and object of each row. One that is not an object raises, or goes to `on_bad`.

    A syntax error in an array raises in any case: nothing after it can be read.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")
    except OSError as error:
        raise R3LiteError(
            f"{path} cannot be read: {error}", "Name a data file, or a hub string name,subset,split."
        ) from error
    if head.startswith(b"PAR1"):
        yield from _parquet_rows(path)
    elif head.startswith(b"["):
        yield from _array_rows(path, on_bad)
    else:
        yield from ((f"line {number}", row) for number, row in read_jsonl(path, on_bad))


def _array_rows(path: Path, on_bad: Callable[[R3LiteError], None] | None) -> Iterator[tuple[str, dict]]:
    """Place and object of each element of a JSON array, decoded one at a time: HotpotQA's is half a gigabyte."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise R3LiteError(f"{path} cannot be read: {error}", "Name a UTF-8 JSON file.") from error
    decoder, number = json.JSONDecoder(), 0
    at = _skip_space(text, text.index("[") + 1)
    while at < len(text) and text[at] != "]":
        number, start = number + 1, at
        try:
            row, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise R3LiteError(
                f"{path}, row {number}: not JSON: {error}", "The file is damaged from here on; get it again."
            ) from error
        problem = half_pair(text[start:at], row) if isinstance(row, dict) else "not a JSON object"
        if problem is None:
            yield f"row {number}", row
        elif on_bad is None:
            raise R3LiteError(f"{path}, row {number}: {problem}", MEND)
        else:
            on_bad(R3LiteError(f"{path}, row {number}: {problem}", MEND))
        at = _skip_space(text, at)
        if text[at : at + 1] == ",":
            at = _skip_space(text, at + 1)
    if at >= len(text):
        raise R3LiteError(
            f"{path} ends inside row {number + 1}: the closing ] is missing", "The file is cut; get it again."
        )


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict]]:
    """Place and content of each row of a parquet file."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise R3LiteError(
            f"{path} is a parquet file, and pyarrow is not installed", "pip install 'r3lite[hub]'"
        ) from error
    try:
        number = 0
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=256):
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise R3LiteError(f"{path} cannot be read as parquet: {error}", "The file is damaged; get it again.") from error
