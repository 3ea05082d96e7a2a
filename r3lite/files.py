"""Files written whole or not at all, and JSON lines read with errors that name the line."""

import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from r3lite.errors import R3LiteError


def write_text(path: str | Path, text: str) -> None:
    """Writes a text file by way of a temporary one beside it, so that a crash leaves the old file or the new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_json(path: str | Path, value) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_jsonl(path: str | Path, records: Iterable[dict]) -> None:
    write_text(path, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict]]:
    """Line number and object of each line that is not blank."""
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        record = json.loads(line)
                    except json.JSONDecodeError as error:
                        raise R3LiteError(f"{path}, line {number}: not JSON: {error}", "Mend or remove the line.") from error
                    if not isinstance(record, dict):
                        raise R3LiteError(f"{path}, line {number}: not a JSON object", "Each line must be one {...}.")
                    yield number, record
    except (OSError, UnicodeDecodeError) as error:
        raise R3LiteError(f"{path} cannot be read: {error}", "Name a UTF-8 file of JSON lines.") from error
