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
from r3lite.core.records import Record
from r3lite.retrieval import index
from r3lite.retrieval.corpus import fingerprint
from r3lite.retrieval.index_size import BLOCK
from r3lite.retrieval.passages import Passages, write_passages
from r3lite.retrieval.vectors import add as add_vectors
from r3lite.retrieval.vectors import open_vectors, write_vectors

MANY = 10_000  # added vectors that are searched one by one; more, and more than a tenth of the index, join it
REMEDY = "Restore the index, or build it again: python -m r3lite.index."


def add(folder: Path, opened: index.PassageIndex, documents: Iterable[Document]) -> tuple[int, int]:
    """Adds the passages that the folder's index lacks; returns how many, and how many it had already.

    Raises R3LiteError if it has another passage of the same id.
    """
    new = {d.id: d for d in documents}
    given = len(new)
    for there in opened.documents:
        if new.pop(there.id, there) != there:
            remedy = f"Delete that one first: --delete {there.id}"
            raise R3LiteError(f"{folder} has another passage with the id {there.id!r}", remedy)
    if not new:
        return 0, given
    fresh, vectors = list(new.values()), opened.vectors
    made = list(index.encoded(opened.encoder, fresh))
    manifest = index.read_manifest(folder)
    waiting = faiss.IndexFlatIP(vectors.base.d)
    if vectors.added:
        add_vectors(waiting, [vectors.added.reconstruct_n(0, vectors.added.ntotal)])
    add_vectors(waiting, made)
    write_passages(folder, fresh, vectors.places)
    names, number = index.parts(manifest), _next(manifest)
    if waiting.ntotal > max(MANY, vectors.base.ntotal // 10):
        path, kind = folder / index.part(manifest, "index"), manifest.text("kind")
        whole = open_vectors(path, kind, REMEDY, mapped=False)
        starts = range(0, waiting.ntotal, BLOCK)
        add_vectors(whole, (waiting.reconstruct_n(i, min(BLOCK, waiting.ntotal - i)) for i in starts))
        names = _without(_without(names, "index"), "added") | _written(folder, f"index-{number}.faiss", whole)
    else:
        names = _without(names, "added") | _written(folder, f"added-{number}.faiss", waiting)
    places = len(vectors.deleted) + len(opened.documents) + len(fresh)
    _publish(folder, manifest, names, Passages(folder, places, vectors.deleted, REMEDY))
    return len(fresh), given - len(fresh)


def delete(folder: Path, ids: Iterable[str]) -> int:
    """Deletes the passages of these ids; returns how many. R3LiteError if one is not there, or none would stay."""
    manifest, wanted = index.read_manifest(folder), set(ids)
    passages, deleted = index.read_passages(folder, manifest, REMEDY), index.read_deleted(folder, manifest, REMEDY)
    numbers = [i for i, document in enumerate(passages) if document.id in wanted]
    if len(numbers) < len(wanted):
        lacking = min(wanted - {passages[i].id for i in numbers})
        raise R3LiteError(f"{folder} has no passage with the id {lacking!r}", "Ids are in its passages.jsonl.")
    if len(numbers) == len(passages):
        raise R3LiteError(f"no passage of {folder} would stay", "Remove the folder instead.")
    after = np.union1d(deleted, [passages.live[i] for i in numbers]).astype("<i8")
    name = f"deleted-{_next(manifest)}.bin"
    (folder / name).write_bytes(after.tobytes())
    names = _without(index.parts(manifest), "deleted") | {name: index.digest(folder / name)}
    _publish(folder, manifest, names, Passages(folder, len(passages) + len(deleted), after, REMEDY))
    return len(numbers)


def _next(manifest: Record) -> int:
    """The number of an edit, which no file of the index has."""
    return manifest.whole("edit", 0) + 1


def _without(names: dict[str, str | None], kind: str) -> dict[str, str | None]:
    return {name: value for name, value in names.items() if not name.startswith(kind)}


def _written(folder: Path, name: str, vectors: faiss.Index) -> dict[str, str]:
    write_vectors(vectors, folder / name)
    return {name: index.digest(folder / name)}


def _publish(folder: Path, manifest: Record, names: dict[str, str | None], passages: Passages) -> None:
    """Replaces the manifest, and removes what the new one does not name."""
    files = {name: value or index.digest(folder / name) for name, value in names.items()}  # older indexes have none
    message = manifest.values | {"passages": len(passages), "fingerprint": fingerprint(passages), "files": files}
    write_json(folder / index.MANIFEST, message | {"edit": _next(manifest)})
    tidy(folder, files)


def tidy(folder: Path, names: Container[str]) -> None:
    """Removes the vectors and deletions that are not those of a manifest: a kill may have come before this."""
    for path in folder.iterdir():
        if index.PARTS.fullmatch(path.name) and path.name not in names:
            with contextlib.suppress(OSError):  # on Windows a reader may have it open; the next edit removes it
                path.unlink()
