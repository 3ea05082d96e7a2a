"""Reading and writing of files.

Files are written whole or not at all, and an output has one writer at a time. Errors about JSON files name the file and
the line. `shipped` finds the files that are shipped with r3lite.
"""

import codecs
import contextlib
import errno
import json
import os
import re
import shutil
import stat
import sys
import tempfile
import time
import tomllib
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from r3lite.core.errors import R3LiteError, UsageError, explained, nearest, reason
from r3lite.core.records import InvalidRecord, Record, Source, parse

MAX_TEXT = 1 << 28  # the most bytes of a text file that is read whole, or of one line of JSON lines
PART = ".part"  # suffix of a file or folder that is being written; if its writer is killed, `sweep` removes it later
LOCK = ".lock"  # name of the lock file in a folder; suffix of the name of a lock file beside an output
LOCK_SECONDS = 0.1  # how long to wait for a lock: its holder may just be ending
GGUF_POINTER = "gguf.json"  # in a model folder made from a GGUF file: says where that file is
ON_WINDOWS = os.name == "nt"
PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)  # seconds between tries to rename a file on Windows
PIECE = 1 << 16  # bytes of a piece that fingerprints read
PIECES = 256  # how many pieces of a large file a fingerprint covers: enough to tell different weights apart
MEND_LINE = "Fix or remove the line, or pass --skip-bad-rows."


def shipped(*parts: str) -> Path:
    """Returns the path of a file or folder shipped with r3lite, which may not exist.

    In a wheel it is inside the package, in a checkout beside the package.
    """
    package = Path(__file__).parents[1]
    in_package = package.joinpath(*parts)
    if in_package.exists():
        return in_package
    return package.parent.joinpath(*parts)


def check_writable(folder: Path) -> None:
    """Makes a folder if it does not exist; raises OSError if nothing can be written into it."""
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()  # tries it: the folder's permissions do not tell for sure


def move(source: str | Path, target: str | Path) -> None:
    """Renames a file or folder; a file that has the new name is replaced.

    Windows cannot rename a file that another program has open, such as a virus scanner that looks at each new file. So
    on Windows the renaming is tried again for some seconds.
    """
    pauses = PAUSES if ON_WINDOWS else ()
    for pause in pauses:
        with contextlib.suppress(PermissionError):
            os.replace(source, target)
            return
        time.sleep(pause)
    os.replace(source, target)


def write_text(path: str | Path, text: str) -> None:
    """Writes a text file, as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, content: bytes) -> None:
    """Writes a file by way of a temporary file beside it, so that a crash leaves the old file or the new one."""
    with _write_target(path) as target:
        temporary = target.with_name(f".{target.name}.{os.getpid()}{PART}")
        try:
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            move(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)


def write_json(path: str | Path, value) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_jsonl(path: str | Path, records: Iterable[dict]) -> None:
    write_text(path, _json_lines(records))


def append_jsonl(path: str | Path, records: Iterable[dict]) -> None:
    """Adds whole lines to a file and waits until they are on the disk."""
    with _write_target(path) as target, open(target, "a", encoding="utf-8", newline="\n") as file:
        file.write(_json_lines(records))
        file.flush()
        os.fsync(file.fileno())


def _json_lines(records: Iterable[dict]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


@contextlib.contextmanager
def _write_target(path: str | Path) -> Iterator[Path]:
    """Makes the folder of a path and yields the file to write: that to which the path leads, if the path is a link.

    Adds the path to an OSError of its block, since errors of writing or flushing (a full disk) name no path.
    """
    target = Path(os.path.realpath(path))
    if target.is_symlink():  # a loop of links leads to no file
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield target
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextlib.contextmanager
def sole_writer(output: str | Path, folder: bool = True) -> Iterator[None]:
    """Keeps every other process from writing to an output while its block runs.

    Raises R3LiteError if another process has locked the output. The operating system releases the lock of a process
    that dies, so that a run that was killed blocks nobody. The lock is on the file `.lock` in the folder `output`,
    which is made, or with `folder=False` on the file `.<name>.lock` beside the file or folder `output`. Folders that
    this call has made are removed at the end if they are empty.
    """
    place = Path(os.path.realpath(output))
    if folder and place.exists() and not place.is_dir():
        raise R3LiteError(f"{output} is a file, not a folder", "Pass a folder.", code="not-a-folder")
    lock_file = place / LOCK if folder else place.with_name(f".{place.name}{LOCK}")
    new_folders = [parent for parent in lock_file.parents if not parent.exists()]  # the innermost first
    try:
        with _locked(lock_file, output):
            yield
    finally:
        with contextlib.suppress(OSError):  # not empty
            for new_folder in new_folders:
                new_folder.rmdir()


@contextlib.contextmanager
def _locked(lock_file: Path, output: str | Path) -> Iterator[None]:
    """Holds the lock on a file while its block runs. The file has this process's number, and is removed at the end."""
    from filelock import FileLock, Timeout  # imported here, so that commands that write nothing do not wait for it

    with explained(OSError, f"{output} cannot be written", "Pass another output.", code="output-unwritable"):
        lock_file.parent.mkdir(parents=True, exist_ok=True)
        lock_file.touch()
    lock = FileLock(
        lock_file,
        timeout=LOCK_SECONDS,
        thread_local=False,
        fallback_to_soft=False,  # a soft lock, a file that merely exists, would outlive a process that is killed
        on_acquired=lambda descriptor: _write_holder(descriptor, lock_file, output),
    )
    try:
        lock.acquire()
    except Timeout:
        holder = _holder_of(lock_file)
        pid = f" (pid {holder})" if holder else ""
        raise R3LiteError(
            f"another process{pid} writes to {output}", "Wait, or pass another output.", code="output-in-use"
        ) from None
    except PermissionError as error:  # another user's file
        raise R3LiteError(
            f"{output} cannot be written: {reason(error)}", "Pass another output.", code="output-unwritable"
        ) from error
    except OSError as error:  # a file system without locks, such as some network drives
        print(
            f"warning: {output} cannot be locked ({reason(error)}): let no other process write there", file=sys.stderr
        )
    try:
        yield
    finally:
        # Removed before the lock is released: after that, the file might be another process's.
        _remove_lock_file(lock_file)
        lock.release()


def _write_holder(descriptor: int, lock_file: Path, output: str | Path) -> None:
    """Writes this process's number into its lock file.

    The number comes after a line break: on Windows, other processes cannot read the first byte, which is locked.
    """
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"\n{os.getpid()}\n".encode())
    except OSError as error:
        _remove_lock_file(lock_file)
        raise R3LiteError(
            f"{output} cannot be written: {reason(error)}", "Free some disk space.", code="output-unwritable"
        ) from error


def _holder_of(lock_file: Path) -> str:
    """Returns the number of the process that has a lock file; "" if the file has just been removed."""
    try:
        with open(lock_file, "rb") as file:
            file.seek(1)
            return file.read(20).decode(errors="replace").strip()
    except OSError:
        return ""


def _remove_lock_file(lock_file: Path) -> None:
    if not ON_WINDOWS:  # on Windows an open file cannot be removed; there FileLock removes it on release
        lock_file.unlink(missing_ok=True)


def sweep(*places: Path) -> None:
    """Removes what a killed process left half written of these files and folders, and inside the folders.

    Only the process that writes them may call this, as it would remove what another process is writing.
    """
    for place in places:
        part_name = re.compile(rf"\.{re.escape(place.name)}\.\w+{re.escape(PART)}")
        parts = [path for path in place.absolute().parent.glob(f".*{PART}") if part_name.fullmatch(path.name)]
        parts += place.rglob(f".*{PART}")
        for part in parts:
            if part.is_dir():
                shutil.rmtree(part, ignore_errors=True)
            else:
                part.unlink(missing_ok=True)


def names_in(folder: Path) -> set[str]:
    """Returns the names of the files and folders in a folder; none if it does not exist.

    Its lock file, and files and folders that a killed process left half written, are left out.
    """
    if not folder.exists():
        return set()
    names = {path.name for path in folder.iterdir()}
    parts = {name for name in names if name.startswith(".") and name.endswith(PART)}
    return names - parts - {LOCK}


def gguf_of(folder: Path) -> list[Path]:
    """Returns the GGUF file that a model folder was made from, as a list of one path; empty for other folders."""
    pointer = folder / GGUF_POINTER
    if not pointer.exists():
        return []
    return [Path(read_record(pointer, "Delete the folder.").text("file"))]


@contextlib.contextmanager
def naming_gguf(folder: Path) -> Iterator[None]:
    """Makes errors of its block name the GGUF file that a folder was made from, as users do not know the folder."""
    try:
        yield
    except R3LiteError as error:
        files = gguf_of(folder)
        if not files:
            raise
        path = str(files[0])
        # FOLDER/config.json becomes "FILE: config.json", and FOLDER alone becomes FILE.
        cause = error.cause.replace(f"{folder}{os.sep}", f"{path}: ").replace(str(folder), path)
        raise R3LiteError(cause, error.remedy, code=error.code) from error


def content_fingerprint(*places: Path) -> str:
    """Returns a CRC-32, as 8 hexadecimal digits, of the content of files, and of the names and content in folders.

    Hidden files in folders are left out. Of a file above MAX_TEXT bytes, such as the vectors of an index, only the size
    and PIECES evenly spaced pieces count.
    """
    checksum = 0
    for place in places:
        if place.is_dir():
            paths = sorted(path for path in place.rglob("*") if path.is_file())
        else:
            paths = [place]
        for path in paths:
            relative = path.relative_to(place)  # of a file that is itself a place: without parts, and "." as text
            if any(part.startswith(".") for part in relative.parts):
                continue
            size = path.stat().st_size
            checksum = zlib.crc32(f"{relative.as_posix()} {size}".encode(), checksum)
            pieces = PIECES if size > MAX_TEXT else _pieces_in(size)
            checksum = _crc_of_pieces(path, pieces, checksum)
    return f"{checksum:08x}"


def _pieces_in(size: int) -> int:
    """Returns how many pieces of PIECE bytes a file of `size` bytes has; the last piece may be shorter."""
    return -(-size // PIECE)


def _crc_of_pieces(path: Path, pieces: int, checksum: int) -> int:
    """Returns the CRC-32 that continues `checksum` with evenly spaced pieces of a file.

    With `_pieces_in(size)` pieces, they cover the whole file.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        for i in range(pieces):
            file.seek(i * size // pieces)
            checksum = zlib.crc32(file.read(PIECE), checksum)
    return checksum


def folder_fingerprint(folder: Path) -> str:
    """Returns a CRC-32 of a model folder, as 8 hexadecimal digits, by which changed weights are noticed.

    It takes only moments, since it covers no more than the name, the size and up to PIECES evenly spaced pieces of each
    file of weights, and the whole of config.json and tokenizer.json.
    """
    checksum = 0
    weights = [*sorted(folder.glob("*.safetensors")), *gguf_of(folder)]
    for path in (*weights, folder / "config.json", folder / "tokenizer.json"):
        if not path.exists():
            continue
        size = path.stat().st_size
        checksum = zlib.crc32(f"{path.name} {size}".encode(), checksum)
        pieces = _pieces_in(size)
        if path.suffix != ".json":
            pieces = min(PIECES, pieces)
        checksum = _crc_of_pieces(path, pieces, checksum)
    return f"{checksum:08x}"


def own_records(
    path: Path, key: str, is_ours: Callable[[dict], bool], writer: str, remedy: str
) -> tuple[list[dict], bytes]:
    """Returns the records of a file that r3lite wrote line by line, and the bytes of an unfinished last line.

    The bytes are empty unless the process was killed while it wrote a line. Every line, also an unfinished one, begins
    with the key `key`. Raises R3LiteError, which names the command `writer`, if a line is neither blank nor unfinished
    nor a record for which `is_ours` is true: then the file is the user's, or the user has written into it.
    """
    if not path.exists():
        return [], b""
    with open_regular(path, remedy) as file:
        # Bytes, since an unfinished line may end inside a character.
        *lines, last = file.read().split(b"\n")
    start = f'{{"{key}": '.encode()
    torn = b""
    # `last` may be shorter than `start`. It is empty if the file ends with a line break.
    begins_like_a_record = last[: len(start)] == start[: len(last)]
    if _object(last) is None and begins_like_a_record:
        torn = last
    else:
        lines.append(last)
    records = []
    for number, line in enumerate(lines, 1):
        record = _object(line)
        if line.strip() and (record is None or not is_ours(record)):
            raise R3LiteError(
                f"{path} exists, and its line {number} was not written by {writer}", remedy, code="foreign-line"
            )
        if record is not None:
            records.append(record)
    return records, torn


def recover_jsonl(path: Path, is_ours: Callable[[dict], bool], writer: str, confirmed: bool) -> list[dict]:
    """Returns the records that an earlier run wrote by `append_jsonl`; removes an unfinished last line from the file.

    `is_ours` tells such records by their keys, of which `id` is the first. If the file has any other content, raises
    R3LiteError, which names the command `writer`, and leaves the file as it is. The same holds for a file that has only
    an unfinished line, because it may be the user's own JSON, which would be lost. With `confirmed`, something beside
    the file shows that `writer` made it, and such a line is removed, too.
    """
    remedy = "Pass another --output, or move the file away."
    records, torn = own_records(path, key="id", is_ours=is_ours, writer=writer, remedy=remedy)
    if torn and not (records or confirmed):
        raise R3LiteError(f"{path} exists, and its line 1 was not written by {writer}", remedy, code="foreign-line")
    if torn:
        os.truncate(path, path.stat().st_size - len(torn))
        print(f"{path}: removed the incomplete last line", file=sys.stderr)
    elif records:
        with open(path, "rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")  # an editor removed the last line break: the next record would continue that line
    return records


def _object(line: bytes) -> dict | None:
    """Returns the JSON object of a line, or None if it is something else."""
    try:
        value = parse(line)
    except InvalidRecord:
        return None
    if not isinstance(value, dict):
        return None
    return value


def similar_path(path: str | Path) -> str:
    """Returns ` (did you mean X?)` for a path that does not exist; "" if no name in its folder is similar.

    X is the path in the same folder whose name is most similar.
    """
    path = Path(path)
    names: set[str] = set()
    with contextlib.suppress(OSError):  # the folder cannot be listed
        names = names_in(path.parent)
    return nearest(path.name, names, prefix=str(path).removesuffix(path.name))


def check_regular(path: str | Path, remedy: str) -> None:
    """Raises R3LiteError unless a path is that of a regular file; a library may wait forever for a pipe or a device."""
    # ValueError: the path is a name that no file can have.
    with explained((OSError, ValueError), f"{path} cannot be read", remedy, code="file-unreadable"):
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError as error:
            cause = f"{path} cannot be read: No such file or directory{similar_path(path)}"
            raise R3LiteError(cause, remedy, code="file-unreadable") from error
    if not stat.S_ISREG(mode):
        kind = "folder" if stat.S_ISDIR(mode) else "pipe or device"
        raise R3LiteError(f"{path} is a {kind}, not a file", remedy, code="not-a-file")


def open_regular(path: str | Path, remedy: str) -> BinaryIO:
    """Opens a file to read bytes. Raises R3LiteError at once for a pipe or a device, which may never end."""
    check_regular(path, remedy)
    with explained(OSError, f"{path} cannot be read", remedy, code="file-unreadable"):
        return open(path, "rb")


def read_text(path: str | Path, remedy: str) -> str:
    """Returns the text of a UTF-8 file of at most MAX_TEXT bytes, without the byte order mark that some editors add."""
    unreadable = explained((OSError, UnicodeDecodeError), f"{path} cannot be read", remedy, code="file-unreadable")
    with open_regular(path, remedy) as file, unreadable:
        content = file.read(MAX_TEXT + 1)
        if len(content) > MAX_TEXT:
            raise R3LiteError(f"{path} is larger than {MAX_TEXT >> 20} MiB", remedy, code="file-too-large")
        return content.decode("utf-8-sig")


def load_toml(path: Path) -> dict[str, Any]:
    """Returns the keys and tables of a TOML file; raises UsageError if it cannot be read."""
    try:
        return tomllib.loads(read_text(path, ""))
    except R3LiteError as error:
        raise UsageError(error.cause, code=error.code) from None
    except (ValueError, RecursionError) as error:  # not TOML, a number of thousands of digits, or deep nesting
        raise UsageError(f"{path} cannot be read: {error}", code="file-unreadable") from None


def read_record(path: str | Path, remedy: str) -> Record:
    """Returns the JSON object that a file holds; raises InvalidRecord, which names the file and what is wrong."""
    values = parse_at_place(path, remedy, read_text(path, remedy))
    return Record(values, Source(str(path), remedy))


def parse_at_place(where: str | Path, remedy: str, text: str | bytes) -> Any:
    """Returns the value of a JSON text; raises InvalidRecord, which names `where`, the text's place."""
    try:
        return parse(text)
    except InvalidRecord as error:
        raise InvalidRecord(f"{where}: {error.cause}", remedy, code=error.code) from error


def read_jsonl(
    path: str | Path, remedy: str = MEND_LINE, on_bad: Callable[[InvalidRecord], None] | None = None
) -> Iterator[Record]:
    """Yields the JSON object of each line that is not blank.

    Raises InvalidRecord at a line that is no JSON object. If `on_bad` is given, it is called with this error instead,
    and the line is left out.
    """
    with (
        open_regular(path, remedy) as file,
        explained(OSError, f"{path} cannot be read", remedy, code="file-unreadable"),
    ):
        lines = iter(lambda: file.readline(MAX_TEXT), b"")
        for number, line in enumerate(lines, 1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            source = Source(f"{path}, line {number}", remedy)
            if len(line) == MAX_TEXT:  # `readline` stopped in the middle of the line
                raise R3LiteError(f"{source.where}: longer than {MAX_TEXT >> 20} MiB", remedy, code="line-too-long")
            try:
                record = Record(parse_at_place(source.where, remedy, line), source)
            except InvalidRecord as bad:
                if on_bad is None:
                    raise
                on_bad(bad)
            else:
                yield record
