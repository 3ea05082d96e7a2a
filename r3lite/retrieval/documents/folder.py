"""A folder of documents, read file by file into passages; what is left out is listed, with the reason."""

import hashlib
import os
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tqdm import tqdm

from r3lite.core.episode import Document
from r3lite.core.errors import R3LiteError
from r3lite.retrieval.documents import BINARY, READERS
from r3lite.retrieval.documents.chunks import chunks, count_tokens
from r3lite.retrieval.documents.section import Unreadable, without_soft_hyphens
from r3lite.retrieval.index import MANIFEST, SKIPPED, VECTORS
from r3lite.settings import DocumentSettings

LONGEST_TITLE = 200  # characters; the last ones are kept, which are of the innermost heading
NAMED = 3  # files that are named of each reason


@dataclass
class Folder:
    """The passages of a folder, and what it holds besides: (path, reason, detail) of what was left out."""

    documents: list[Document] = field(default_factory=list)
    files: int = 0  # that have a passage
    duplicates: int = 0  # passages that another file, or the same one, has already
    skipped: list[tuple[str, str, str]] = field(default_factory=list)

    def summary(self) -> str:
        """How much was read and left out: the number of each reason and the first names, most frequent first."""
        lines = [f"documents   {self.files} ({self.duplicates} duplicate passages)"]
        lines += [f"skipped     {len(self.skipped)}, listed in {SKIPPED} of the index"] * bool(self.skipped)
        for reason, count in Counter(reason for _, reason, _ in self.skipped).most_common():
            names = [path for path, why, _ in self.skipped if why == reason]
            lines.append(f"  {count} {reason}: {', '.join(names[:NAMED])}" + ", ..." * (count > NAMED))
        return "\n".join(lines)


def read_folder(folder: str | Path, settings: DocumentSettings) -> Folder:
    """The passages of a folder's documents, in the order of their names; a folder's files before its folders.

    A passage's id is the path of its file and a hash of its title and text: it stays as long as they do, whatever
    else changes. Memory holds one file beside the passages.
    """
    root, found, seen = Path(folder), Folder(), set()
    if not root.is_dir():
        raise R3LiteError(f"{folder} is not a folder", "Pass a file of passages as --corpus.")
    for name in tqdm(list(_files(root, found.skipped)), desc="reading documents", unit="", disable=None):
        try:
            count = len(found.documents)
            for title, head, text in _passages(root, name, settings):
                key = hashlib.sha256(f"{title}\n{text}".encode()).hexdigest()[:16]
                if key in seen:
                    found.duplicates += 1
                    continue
                seen.add(key)
                title = title or PurePosixPath(name).stem
                found.documents.append(Document(f"{name}#{key}", title, head + text))
            if len(found.documents) == count:
                raise Unreadable("with the same text as other files")
            found.files += 1
        except Unreadable as error:
            found.skipped.append((name, error.reason, error.detail))
    if not found.documents:
        raise R3LiteError(f"{folder} has no readable document\n{found.summary()}", f"Supported: {', '.join(READERS)}.")
    return found


def _files(root: Path, skipped: list[tuple[str, str, str]]) -> Iterator[str]:
    """The paths of files to read, relative to the folder and with slashes, in the same order on every machine.

    Links are not followed: what one leads to in the folder is read there, and the rest does not belong to it.
    """

    def unreadable(error: OSError) -> None:
        skipped.append((_name(Path(error.filename), root), "that cannot be read", error.strerror))

    for place, folders, files in os.walk(root, onerror=unreadable):
        here = Path(place)
        if here != root and {VECTORS, MANIFEST} <= set(files):
            skipped.append((_name(here, root), "an index of r3lite", ""))
            folders.clear()
            continue
        for name in list(folders):
            if reason := _left_out(here / name):
                folders.remove(name)
                skipped.append((_name(here / name, root) + "/", reason, ""))
        folders.sort()
        for name in sorted(files):
            shown = _name(here / name, root)
            suffix = PurePosixPath(name).suffix.lower()
            if reason := "with an unprintable name" if "\ufffd" in shown else _left_out(here / name):
                skipped.append((shown, reason, ""))
            elif suffix not in READERS:
                skipped.append((shown, "of an unsupported type", suffix))
            else:
                yield shown


def _left_out(path: Path) -> str:
    return "hidden" if path.name.startswith(".") else "a link" if path.is_symlink() else ""


def _name(path: Path, root: Path) -> str:
    """A path in the folder as text; what is not UTF-8 or not printable (an escape, a line end) is U+FFFD."""
    name = os.fsencode(path.relative_to(root).as_posix()).decode(errors="replace")
    return "".join(sign if sign.isprintable() else "\ufffd" for sign in name)


def _passages(root: Path, name: str, settings: DocumentSettings) -> Iterator[tuple[str, str, str]]:
    """The titles, heads and texts of a file's passages. Nothing comes of a file that can be read in part only."""
    content = _content(root / name, settings.max_file_mib << 20)
    suffix = PurePosixPath(name).suffix.lower()
    found = READERS[suffix](content if suffix in BINARY else _decoded(content), name)
    sections = [section for section in found if section.text.strip()]
    if not sections:
        raise Unreadable("without text")
    for section in sections:
        title = " ".join(without_soft_hyphens(section.title).split())
        title = title if len(title) <= LONGEST_TITLE else f"...{title[-LONGEST_TITLE:]}"
        # The title is encoded with each passage, and so counts; but half the budget at least is for the text.
        room = settings.chunk_tokens - count_tokens(title) - count_tokens(section.head)
        room = max(room, settings.chunk_tokens // 2)
        for text in chunks(without_soft_hyphens(section.text), room, settings.chunk_overlap):
            if text.strip():
                yield title, section.head, text


def _content(path: Path, most: int) -> bytes:
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise Unreadable("that are pipes or devices")
        if status.st_size > most:
            raise Unreadable(f"larger than {most >> 20} MiB", f"{status.st_size:,} bytes; --max-file-mib")
        with open(path, "rb") as file:
            content = file.read(most + 1)  # it may grow meanwhile
    except OSError as error:
        raise Unreadable("that cannot be read", error.strerror or str(error)) from error
    if not content.strip():
        raise Unreadable("empty")
    return content[:most]


def _decoded(content: bytes) -> str:
    if b"\0" in content:
        raise Unreadable("binary or in UTF-16", "contains a NUL byte")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable("not in UTF-8", str(error)) from error
