"""Adds passages to an index and deletes some, without making it anew; others may read it meanwhile.

What is added is appended to the passages, and its vectors to a flat index beside the index itself, which takes them in
once they are many. What is deleted stays where it is, and searches leave it out. Files of vectors are written under new
names, the manifest is replaced last, and then what it no longer names is removed: a reader has all of the old or all
of the new.
"""

import contextlib
from collections.abc import Container, Iterable
from pathlib import Path

import faiss
import numpy as np

from r3lite.core.episode import Document
from r3lite.core.errors import R3LiteError
from r3lite.core.files import write_json
from r3lite.retrieval import index
from r3lite.retrieval.corpus import Passages, fingerprint, write_passages
from r3lite.retrieval.vectors import add as add_vectors
from r3lite.retrieval.vectors import blocks_of, open_vectors, write_vectors

MANY = 10_000  # added vectors that are searched one by one; more, and more than a tenth of the index, join it


def add(path: Path, opened: index.PassageIndex, documents: Iterable[Document]) -> tuple[int, int]:
    """Adds the passages that the folder's index lacks; returns how many, and how many it had already.

    Raises R3LiteError if it has another passage of the same id.
    """
    new = {d.id: d for d in documents}
    given = len(new)
    for there in opened.documents:
        if new.pop(there.id, there) != there:
            raise R3LiteError(f"{path} has another passage with the id {there.id!r}", f"First --delete {there.id}")
    if not new:
        return 0, given
    fresh, vectors = list(new.values()), opened.vectors
    made = list(index.encoded(opened.encoder, fresh))
    folder = index.Folder(path)
    waiting = faiss.IndexFlatIP(vectors.base.d)
    if vectors.added:
        add_vectors(waiting, [vectors.added.reconstruct_n(0, vectors.added.ntotal)])
    add_vectors(waiting, made)
    write_passages(path, fresh, vectors.places)
    replaced, written = "added", waiting
    if waiting.ntotal > max(MANY, vectors.base.ntotal // 10):
        written = open_vectors(folder.file("index"), folder.manifest.text("kind"), folder.remedy, mapped=False)
        add_vectors(written, blocks_of(waiting))
        replaced = ("index", "added")
    name = f"{'added' if written is waiting else 'index'}-{_next(folder)}.faiss"
    write_vectors(written, path / name)
    places = len(vectors.deleted) + len(opened.documents) + len(fresh)
    _publish(folder, replaced, name, Passages(path, places, vectors.deleted, folder.remedy))
    return len(fresh), given - len(fresh)


def delete(path: Path, ids: Iterable[str]) -> int:
    """Deletes the passages of these ids; returns how many. R3LiteError if one is not there, or none would stay."""
    folder, wanted = index.Folder(path), set(ids)
    passages, deleted = folder.passages(), folder.deleted()
    numbers = [i for i, document in enumerate(passages) if document.id in wanted]
    if len(numbers) < len(wanted):
        lacking = min(wanted - {passages[i].id for i in numbers})
        raise R3LiteError(f"{path} has no passage with the id {lacking!r}", "Ids are in its passages.jsonl.")
    if len(numbers) == len(passages):
        raise R3LiteError(f"no passage of {path} would stay", "Remove the folder instead.")
    after = np.union1d(deleted, [passages.live[i] for i in numbers]).astype("<i8")
    name = f"deleted-{_next(folder)}.bin"
    (path / name).write_bytes(after.tobytes())
    _publish(folder, "deleted", name, Passages(path, len(passages) + len(deleted), after, folder.remedy))
    return len(numbers)


def _next(folder: index.Folder) -> int:
    """The number of an edit, which no file of the index has."""
    return folder.manifest.whole("edit", 0) + 1


def _publish(folder: index.Folder, replaced: str | tuple[str, ...], name: str, passages: Passages) -> None:
    """Replaces the manifest, in which the file `name` takes the place of those of the roles `replaced`; removes what
    the new one does not name."""
    kept = {kept: value for kept, value in folder.digests.items() if not kept.startswith(replaced)}
    files = {file: value or index.digest(folder.path / file) for file, value in (kept | {name: None}).items()}
    changed = {"passages": len(passages), "fingerprint": fingerprint(passages), "files": files}
    write_json(folder.path / index.MANIFEST, folder.manifest.values | changed | {"edit": _next(folder)})
    tidy(folder.path, files)


def tidy(folder: Path, names: Container[str]) -> None:
    """Removes the vectors and deletions that are not those of a manifest: a kill may have come before this."""
    for path in folder.iterdir():
        if index.PARTS.fullmatch(path.name) and path.name not in names:
            with contextlib.suppress(OSError):  # on Windows a reader may have it open; the next edit removes it
                path.unlink()
