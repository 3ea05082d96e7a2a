"""Files written whole or not at all, and JSON files read with errors that name file and line."""

import itertools
import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from r3lite.errors import R3LiteError
from r3lite.records import InvalidRecord, Record, Source, parse

MAX_TEXT = 1 << 28  # bytes of a file that is read whole, or of one line of JSON lines
MEND_LINE = "Mend or remove the line, or pass --skip-bad-rows."


def check_writable(folder: Path) -> None:
    """Makes a folder if it does not exist; raises OSError if nothing can be written into it."""
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()  # permissions alone do not tell


def write_text(path: str | Path, text: str) -> None:
    """Writes a text file by way of a temporary one beside it, so that a crash leaves the old file or the new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | Path, value) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_jsonl(path: str | Path, records: Iterable[dict]) -> None:
    write_text(path, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))


def append_jsonl(path: str | Path, records: Iterable[dict]) -> None:
    """Adds whole lines to a file and waits until they are on the disk."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8", newline="\n") as file:
        file.write("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
        file.flush()
        os.fsync(file.fileno())


def recover_jsonl(path: Path, is_ours: Callable[[dict], bool], writer: str) -> list[dict]:
    """The records of a file that an earlier run wrote by `append_jsonl`; an unfinished last line is removed from it.

    `is_ours` tells such records by their keys, of which `id` is the first. A file with any other content is refused,
    naming the command `writer`, and left as it is.
    """
    if not path.exists():
        return []
    # Bytes, since an unfinished line may end inside a character.
    *lines, last = path.read_bytes().split(b"\n")
    torn = _object(last) is None and last[:7] == b'{"id": '[: len(last)]  # how every line of such a file begins
    records = []
    for number, line in enumerate(lines if torn else [*lines, last], 1):
        record = _object(line)
        if line.strip() and (record is None or not is_ours(record)):
            cause = f"{path} exists, and its line {number} was not written by {writer}"
            raise R3LiteError(cause, "Name another --output, or move the file away.")
        records += [] if record is None else [record]
    if last:
        if torn:
            print(f"{path}: the last line is torn and was removed", file=sys.stderr)
        write_jsonl(path, records)
    return records


def _object(line: bytes) -> dict | None:
    """The JSON object of a line, or None if it is something else."""
    try:
        value = parse(line.decode())
    except ValueError:  # neither JSON nor UTF-8
        return None
    return value if isinstance(value, dict) else None


def check_regular(path: str | Path, remedy: str) -> None:
    """Raises R3LiteError unless a path is that of a file; a library may wait for a pipe or a device without end."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise R3LiteError(f"{path} cannot be read: {error}", remedy) from error
    if not stat.S_ISREG(mode):
        kind = "folder" if stat.S_ISDIR(mode) else "pipe or a device"
        raise R3LiteError(f"{path} is a {kind}, not a file", remedy)


def open_regular(path: str | Path, remedy: str) -> BinaryIO:
    """A file opened for reading. A pipe or a device, which may never end, is refused without waiting for it."""
    check_regular(path, remedy)
    try:
        return open(path, "rb")
    except OSError as error:
        raise R3LiteError(f"{path} cannot be read: {error}", remedy) from error


def read_text(path: str | Path, remedy: str) -> str:
    """The text of a UTF-8 file of at most MAX_TEXT bytes, without the byte order mark that editors on Windows write."""
    with open_regular(path, remedy) as file:
        try:
            content = file.read(MAX_TEXT + 1)
            if len(content) > MAX_TEXT:
                raise R3LiteError(f"{path} is larger than {MAX_TEXT >> 20} MiB", remedy)
            return content.decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise R3LiteError(f"{path} cannot be read: {error}", remedy) from error


def read_record(path: str | Path, remedy: str) -> Record:
    """The JSON object that a file holds; InvalidRecord names the file and what is wrong."""
    return Record(within(path, remedy, read_text(path, remedy)), Source(str(path), remedy))


def within(where: str | Path, remedy: str, text: str) -> Any:
    """The value of a JSON text; an error names the place that the text is from."""
    try:
        return parse(text)
    except InvalidRecord as error:
        raise InvalidRecord(f"{where}: {error.cause}", remedy) from error


def read_jsonl(
    path: str | Path, remedy: str = MEND_LINE, on_bad: Callable[[InvalidRecord], None] | None = None
) -> Iterator[Record]:
    """The object of each line that is not blank; a bad line raises, or goes to `on_bad` and is left out."""
    with open_regular(path, remedy) as file:
        for number in itertools.count(1):
            try:
                line = file.readline(MAX_TEXT)
            except OSError as error:
                raise R3LiteError(f"{path} cannot be read: {error}", remedy) from error
            if not line:
                return
            if not line.strip():
                continue
            source = Source(f"{path}, line {number}", remedy)
            try:
                if len(line) == MAX_TEXT:  # what follows is not the next line
                    raise R3LiteError(f"{source.where}: it is longer than {MAX_TEXT >> 20} MiB", remedy)
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                record = Record(within(source.where, remedy, text), source)
            except UnicodeDecodeError as error:
                bad = InvalidRecord(f"{source.where}: not UTF-8: {error}", remedy)
            except InvalidRecord as error:
                bad = error
            else:
                yield record
                continue
            if on_bad is None:
                raise bad
            on_bad(bad)
