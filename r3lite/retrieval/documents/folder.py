"""A folder of documents, read file by file into passages; files that are left out are listed, with the reason."""

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tqdm import tqdm

from r3lite.core.episode import Document
from r3lite.core.errors import R3LiteError
from r3lite.retrieval.documents import BINARY, READERS
from r3lite.retrieval.documents.chunks import chunks, count_tokens
from r3lite.retrieval.documents.section import Unreadable, without_soft_hyphens
from r3lite.retrieval.index import MANIFEST, SKIPPED, VECTOR_FILES
from r3lite.settings import DocumentSettings

LONGEST_TITLE = 200  # characters; of a longer title the end is kept, which has the innermost heading
NAMED = 3  # files that a summary names for each reason


@dataclass
class DocumentFolder:
    """The passages of a folder, and (path, reason, detail) of each file that was left out."""

    documents: list[Document] = field(default_factory=list)
    files: int = 0  # that have a passage
    duplicates: int = 0  # passages that another file, or the same one, has already
    skipped: list[tuple[str, str, str]] = field(default_factory=list)

    def summary(self, is_listed: bool = False) -> str:
        """Returns how much was read and left out: for each reason, the most frequent first, the number of its files and
        the names of the first ones. `is_listed` tells whether the index will have a list of all of them."""
        lines = [f"documents   {self.files} ({self.duplicates} duplicate passages)"]
        if self.skipped:
            place = f", listed in {SKIPPED} of the index" if is_listed else ""
            lines.append(f"skipped     {len(self.skipped)}{place}")
        by_reason: dict[str, list[str]] = {}
        for path, reason, _ in self.skipped:
            by_reason.setdefault(reason, []).append(path)
        for reason, names in sorted(by_reason.items(), key=lambda item: -len(item[1])):
            line = f"  {len(names)} {reason}: {', '.join(names[:NAMED])}"
            if len(names) > NAMED:
                line += ", ..."
            lines.append(line)
        return "\n".join(lines)


def read_folder(folder: str | Path, settings: DocumentSettings) -> DocumentFolder:
    """Returns the passages of a folder's documents, in the order of their names; files come before subfolders.

    A passage's id is the path of its file and a hash of its title and text: it changes only if one of these does.
    One file at a time is in memory beside the passages.
    """
    root = Path(folder)
    if not root.is_dir():
        remedy = "Pass the folder of the documents; a JSON Lines file of passages is --corpus."
        raise R3LiteError(f"{folder} is not a folder", remedy, code="not-a-folder")
    result = DocumentFolder()
    keys: set[str] = set()
    for name in tqdm(list(_files(root, result.skipped)), desc="reading documents", unit="", disable=None):
        try:
            count = len(result.documents)
            for title, head, text in _passages(root, name, settings):
                key = hashlib.sha256(f"{title}\n{text}".encode()).hexdigest()[:16]
                if key in keys:
                    result.duplicates += 1
                    continue
                keys.add(key)
                title = title or PurePosixPath(name).stem
                result.documents.append(Document(f"{name}#{key}", title, head + text))
            if len(result.documents) == count:
                raise Unreadable("with the same text as other files")
            result.files += 1
        except Unreadable as error:
            result.skipped.append((name, error.reason, error.detail))
    if not result.documents:
        cause = f"{folder} has no readable document\n{result.summary()}"
        raise R3LiteError(cause, f"Supported: {', '.join(READERS)}.", code="no-documents")
    return result


def _files(root: Path, skipped: list[tuple[str, str, str]]) -> Iterator[str]:
    """Yields the paths of files to read, relative to the folder and with slashes, in the same order on every machine.

    Links are not followed: a target in the folder is read at its own place, and no other target belongs to the folder.
    """

    def unreadable(error: OSError) -> None:
        skipped.append((_name(Path(error.filename), root), "that cannot be read", error.strerror))

    for place, folders, files in os.walk(root, onerror=unreadable):
        here = Path(place)
        if here != root and MANIFEST in files and any(map(VECTOR_FILES.fullmatch, files)):
            skipped.append((_name(here, root), "an index of r3lite", ""))
            folders.clear()
            continue
        for name in list(folders):
            reason = _exclusion(here / name)
            if reason:
                folders.remove(name)
                skipped.append((_name(here / name, root) + "/", reason, ""))
        folders.sort()
        for name in sorted(files):
            path = _name(here / name, root)
            suffix = PurePosixPath(name).suffix.lower()
            reason = "with an unprintable name" if "\ufffd" in path else _exclusion(here / name)
            if reason:
                skipped.append((path, reason, ""))
            elif suffix not in READERS:
                skipped.append((path, "of an unsupported type", suffix))
            else:
                yield path


def _exclusion(path: Path) -> str:
    """Returns the reason why a file or folder is left out; empty if it is not."""
    if path.name.startswith("."):
        return "hidden"
    if path.is_symlink():
        return "a link"
    return ""


def _name(path: Path, root: Path) -> str:
    """Returns a path in the folder as text; U+FFFD stands for bytes that are not UTF-8 and for characters that are not
    printable (an escape, a line end)."""
    name = os.fsencode(path.relative_to(root).as_posix()).decode(errors="replace")
    return "".join(sign if sign.isprintable() else "\ufffd" for sign in name)


def _passages(
    root: Path,
    name: str,
    settings: DocumentSettings,
) -> Iterator[tuple[str, str, str]]:
    """Yields the titles, heads and texts of a file's passages, once all of the file was read without error."""
    content: bytes | str = _content(root / name, settings.max_file_mib << 20)
    suffix = PurePosixPath(name).suffix.lower()
    if suffix not in BINARY:
        content = _decoded(content)
    sections = [section for section in READERS[suffix](content, name) if section.text.strip()]
    if not sections:
        raise Unreadable("without text")
    for section in sections:
        title = " ".join(without_soft_hyphens(section.title).split())
        if len(title) > LONGEST_TITLE:
            title = f"...{title[-LONGEST_TITLE:]}"
        # Title and head are encoded with each passage, and so count; but at least half of the budget is for the text.
        budget = settings.chunk_tokens - count_tokens(title) - count_tokens(section.head)
        budget = max(budget, settings.chunk_tokens // 2)
        for text in chunks(without_soft_hyphens(section.text), budget, settings.chunk_overlap):
            if text.strip():
                yield title, section.head, text


def _content(path: Path, limit: int) -> bytes:
    """Returns the bytes of a file. Raises Unreadable if it is no regular file, empty, or larger than `limit` bytes."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise Unreadable("that are pipes or devices")
        if status.st_size > limit:
            raise Unreadable(f"larger than {limit >> 20} MiB", f"{status.st_size:,} bytes; --max-file-mib")
        with open(path, "rb") as file:
            content = file.read(limit + 1)  # the file may have grown meanwhile
    except OSError as error:
        raise Unreadable("that cannot be read", error.strerror or str(error)) from error
    if len(content) > limit:
        raise Unreadable(f"larger than {limit >> 20} MiB", "it is growing; --max-file-mib")
    if not content.strip():
        raise Unreadable("empty")
    return content


def _decoded(content: bytes) -> str:
    if b"\0" in content:
        raise Unreadable("binary or in UTF-16", "contains a NUL byte")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable("not in UTF-8", str(error)) from error
