"""Files written whole or not at all, and JSON lines read with errors that name the line."""

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from r3lite.errors import R3LiteError


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
        value = json.loads(line)
    except ValueError:  # neither JSON nor UTF-8
        return None
    return value if isinstance(value, dict) else None


def read_jsonl(path: str | Path, on_bad: Callable[[R3LiteError], None] | None = None) -> Iterator[tuple[int, dict]]:
    """Line number and object of each line that is not blank; a bad line raises, or goes to `on_bad` and is left out."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")  # editors on Windows write a mark
    except (OSError, UnicodeDecodeError) as error:
        raise R3LiteError(f"{path} cannot be read: {error}", "Name a UTF-8 file of JSON lines.") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            problem = half_pair(line, record) if isinstance(record, dict) else "not a JSON object"
        except json.JSONDecodeError as error:
            problem = f"not JSON: {error}"
        if problem is None:
            yield number, record
            continue
        bad = R3LiteError(f"{path}, line {number}: {problem}", "Mend or remove the line, or pass --skip-bad-rows.")
        if on_bad is None:
            raise bad
        on_bad(bad)


def half_pair(text: str, value) -> str | None:
    """What is wrong with the `value` of a JSON `text` that holds half of a surrogate pair, or None.

    Only an escape such as "\\ud83d" can bring one in, and nothing takes it later: neither a tokenizer nor a UTF-8 file.
    """
    if re.search(r"\\u[dD]", text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            return f"it holds half of a surrogate pair ({error.object[error.start]!a})"
    return None
