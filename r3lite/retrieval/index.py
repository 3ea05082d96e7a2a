"""A FAISS index of a corpus, kept in a folder with a manifest, searched, and refused when it does not match.

Owns the index folder and its manifest. `building.py` writes one; here passages are added and deleted without making it
anew, while others may read it. What is added is appended to the passages, and its vectors to a flat index beside the
index itself, which takes them in once they are many. What is deleted stays in its place, and searches leave it out.
Files of vectors are written under new names, the manifest is replaced last, and then what it no longer names is
removed: a reader has all of the old or all of the new. What is in a folder:

passages.jsonl, ends.bin       the passages, and where their lines end (`corpus.py`)
index.faiss or index-N.faiss   their vectors (`vectors.py`)
added-N.faiss, deleted-N.bin   vectors added since, and the places of what was deleted, after edit N, if there are any
probes.bin                     some of the vectors as the encoder gave them: an index may keep less
manifest.json                  what made it, and which of these files belong together; it is replaced last
words.json, skipped.jsonl      of the hashing encoder; of a folder of documents

An older folder has a flat index and no ends, probes and table of files; it is read as it is.
"""

import contextlib
import hashlib
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn, TypeVar

import faiss
import numpy as np
from tqdm import tqdm

from r3lite.core.episode import Document
from r3lite.core.errors import R3LiteError, explained
from r3lite.core.files import PIECE, PIECES, check_regular, read_record, write_json
from r3lite.core.records import Record
from r3lite.retrieval.conventions import STYLES
from r3lite.retrieval.corpus import ENDS, PASSAGES, Passages, fingerprint, write_passages
from r3lite.retrieval.encoder import HASHING, Encoder, EncoderSettings, HashingEncoder, make_encoder
from r3lite.retrieval.search import best, found
from r3lite.retrieval.vectors import BLOCK, CLASSES, Vectors, add_vectors, blocks_of, open_vectors, write_vectors

VERSION = 1
VECTORS, MANIFEST = "index.faiss", "manifest.json"
PROBES = "probes.bin"
SKIPPED = "skipped.jsonl"  # what a folder of documents holds besides; no search needs it
OWN = {PASSAGES, ENDS, MANIFEST, PROBES, SKIPPED, HashingEncoder.FILE}
PARTS = re.compile(r"index(-\d+)?\.faiss|added-\d+\.faiss|deleted-\d+\.bin")
FURTHEST = 0.045  # of a vector from what the same encoder makes of its passage, by its length: a cosine of 0.999
READ_WHOLE = 1 << 30  # bytes of a file of vectors up to which all of it is compared with its digest
COMPARED = 1_000_000  # passages up to which all are compared with their fingerprint
MANY = 10_000  # added vectors that are searched one by one; more, and more than a tenth of the index, join it
BUILD = "python -m r3lite.index --documents FOLDER (or --corpus FILE.jsonl)"
T = TypeVar("T")


@dataclass
class PassageIndex:
    """Passages, their vectors, and the encoder that made them."""

    encoder: Encoder
    documents: Sequence[Document]
    vectors: Vectors

    def search(self, queries: list[str], k: int, own: list[tuple[int, ...]] | None = None) -> list[list[Document]]:
        """The `k` nearest passages of each query, nearest first; of the places in `own[i]` only, for query i, if given.

        Fewer than `k` if the index holds fewer. None for a query without any word that a hashing encoder knows: its
        vector is zero, and all passages are equally near.
        """
        if not queries:
            return []
        vectors = self.encoder.encode_queries(queries)
        if own is None:
            rows = self.vectors.search(vectors, k)
        else:  # only of an index that was just built, which is flat
            rows = []
            for vector, mine in zip(vectors, (np.array(places, dtype=np.int64) for places in own), strict=True):
                products = self.vectors.base.reconstruct_batch(mine) @ vector
                order = best(products, k)
                rows.append((products[order], mine[order]))
        known = vectors.any(axis=1)
        return [found(self.documents, p, s, "semantic") if any_ else [] for (s, p), any_ in zip(rows, known)]

    def only(self, fit: np.ndarray) -> "PassageIndex":
        """The index of those passages for which `fit` [N] is true, without copying vectors."""
        return replace(self, documents=self.documents.only(fit), vectors=self.vectors.only(fit))


def build(encoder: Encoder, documents: list[Document]) -> PassageIndex:
    """Encodes the passages, a block at a time, into a new flat index in memory."""
    vectors = faiss.IndexFlatIP(encoder.dimension)
    add_vectors(vectors, encoded(encoder, documents))
    return PassageIndex(encoder, documents, Vectors(vectors))


def encoded(encoder: Encoder, documents: Sequence[Document], start: int = 0) -> Iterator[np.ndarray]:
    """Vectors [N, d] of the passages from `start` on, a block at a time, which are finite."""
    with tqdm(total=len(documents), initial=start, desc="encoding passages", unit="", disable=None) as bar:
        for i in range(start, len(documents), BLOCK):
            made = encoder.encode_passages(documents[i : i + BLOCK], bar.update)
            if not np.isfinite(made).all():
                cause = f"the encoder {encoder.settings['encoder']} computes vectors that are not finite"
                raise R3LiteError(cause, "Its weights may be damaged: download them again, or pass another --encoder.")
            yield made


def load(
    path: Path, settings: EncoderSettings, device: str = "cpu", batch_size: int = 32, known: Encoder | None = None
) -> PassageIndex:
    """The index of a folder; its vectors are read as searches need them.

    `known` is an encoder of the same name: it is used again, and none is loaded, if its style is the index's.
    Raises R3LiteError if it was made by another encoder or style than is asked for (style auto takes the index's own),
    or if its parts do not belong together.
    """
    encoder_name, style, manifest = settings.encoder, settings.encoder_style, read_manifest(path)
    rebuild = f"build a new index: {BUILD} --encoder {encoder_name} --output ANOTHER_FOLDER"
    kept_encoder, kept_style = manifest.text("encoder"), manifest.text("style", "plain")
    is_hashing = encoder_name == HASHING
    # Asked before the encoder is loaded, which may take long.
    if is_hashing != (kept_encoder == HASHING):
        _refuse(path, "encoder", kept_encoder, encoder_name, f"Pass --encoder {kept_encoder}, or {rebuild}")
    if style not in ("auto", kept_style) and not is_hashing:
        _refuse(path, "style", kept_style, style, f"Remove --encoder-style, or {rebuild} --encoder-style {style}")
    if is_hashing:
        encoder = HashingEncoder.load(path)
    elif known and known.settings.get("style") == kept_style:
        encoder = known
    else:
        encoder = make_encoder(replace(settings, encoder_style=kept_style), (), device, batch_size)
    for key, value in encoder.settings.items():
        # The name may be another one of the same model; its vectors tell, below. They also tell if bf16 is too coarse.
        if key not in ("encoder", "dtype") and manifest.values.get(key) != value:
            _refuse(path, key, manifest.values.get(key), value, f"Pass --encoder {kept_encoder}, or {rebuild}")
    passages, vectors, probes = consistent(path, lambda folder: (folder.passages(), *folder.vectors()))
    # Some passages' vectors must come out again: this tells other weights of the same shape, and another order.
    fresh = encoder.encode_passages([passages.at(place) for place in probes], lambda n: None)
    if not same_vectors(fresh, np.stack(list(probes.values()))):
        asked = f"this version of {encoder_name}: the vectors differ"
        _refuse(path, "encoder", kept_encoder, asked, f"Pass the encoder that it was built with, or {rebuild}")
    return PassageIndex(encoder, passages, vectors)


def same_vectors(fresh: np.ndarray, before: np.ndarray) -> bool:
    """Whether an encoder gives the vectors [N, d] that it gave before, up to its precision; False if one is NaN."""
    lengths = np.maximum(np.linalg.norm(before, axis=1), 1)  # of a text without a known word 0
    return bool((np.linalg.norm(fresh - before, axis=1) <= FURTHEST * lengths).all())


def _refuse(path: Path, what: str, kept, asked, remedy: str) -> NoReturn:
    raise R3LiteError(f"the index {path} was built with {what} {kept}, not {asked}", remedy)


def read_documents(path: Path) -> Passages:
    """The passages of an index, without its vectors and encoder."""
    return consistent(path, lambda folder: folder.passages())


def consistent(path: Path, read: Callable[["Folder"], T]) -> T:
    """What `read` makes of a folder. If another process edits the index meanwhile, its files may be gone before they
    are opened, and all is read again."""
    folder = Folder(path)
    while True:
        try:
            return read(folder)
        except (R3LiteError, OSError):
            now = Folder(path)
            if now.manifest.values == folder.manifest.values:
                raise
            folder = now


def read_manifest(path: Path) -> Record:
    remedy = f"Build one in a new folder: {BUILD} --output FOLDER"
    with explained(R3LiteError, f"{path} is not an index, or not of this version", remedy):
        manifest = read_record(path / MANIFEST, remedy)
        if (version := manifest.whole("version")) != VERSION:
            raise manifest.error(f"version {version}, not {VERSION}")
        for key in ("encoder", "fingerprint"):
            manifest.text(key)
        for key in ("dimension", "passages"):
            manifest.whole(key, low=1)
        manifest.choice("style", STYLES, "plain")
        manifest.values.setdefault("kind", "flat")  # an older index has neither
        manifest.values.setdefault("files", {VECTORS: manifest.text("vectors", None)})
        manifest.choice("kind", CLASSES)
        for name in manifest.record("files").values:
            if not PARTS.fullmatch(name):
                raise manifest.error(f"{name!r} is not a file of an index")
    return manifest


class Folder:
    """An index folder as its manifest describes it now. Raises R3LiteError if a file does not belong to it."""

    def __init__(self, path: Path):
        self.path, self.manifest = path, read_manifest(path)
        encoder, files = self.manifest.text("encoder"), self.manifest.record("files")
        self.remedy = f"Restore it, or build the index again: {BUILD} --encoder {encoder} --output {path}"
        self.digests = {name: files.text(name, None) for name in files.values}  # older indexes have none

    def file(self, role: str) -> Path | None:
        """The file that is the index, what was added or what was deleted, checked by its digest; None without one."""
        name = next((name for name in self.digests if name.startswith(role)), None)
        if name is None:
            return None
        check_regular(self.path / name, self.remedy)  # FAISS would wait for a pipe for ever
        if self.digests[name] not in (None, digest(self.path / name)):
            raise R3LiteError(f"{self.path / name} has changed since it was written", self.remedy)
        return self.path / name

    def deleted(self) -> np.ndarray:
        """The places of deleted passages, sorted."""
        path = self.file("deleted")
        return np.fromfile(path, dtype="<i8") if path else np.empty(0, np.int64)

    def passages(self) -> Passages:
        deleted = self.deleted()
        passages = Passages(self.path, self.manifest.whole("passages") + len(deleted), deleted, self.remedy)
        if len(passages) <= COMPARED and fingerprint(passages) != self.manifest.text("fingerprint"):
            raise self._unfit(f"{PASSAGES} has changed since it was indexed")
        return passages

    def vectors(self) -> tuple[Vectors, dict[int, np.ndarray]]:
        """The vectors of an index, and some of them as the encoder gave them, by their places."""
        path, added, manifest = self.file("index"), self.file("added"), self.manifest
        base = open_vectors(path, manifest.text("kind"), self.remedy)
        vectors = Vectors(base, added and open_vectors(added, "flat", self.remedy), self.deleted())
        dimension, indexed = manifest.whole("dimension"), manifest.whole("passages")
        if (passages := vectors.places - len(vectors.deleted)) != indexed:
            raise self._unfit(f"{path.name} has {passages} vectors for {indexed} passages")
        if base.d != dimension:
            raise self._unfit(f"{path.name} has {base.d} dimensions, not {dimension}")
        if None in self.digests.values() and not all(np.isfinite(b).all() for b in blocks_of(base)):  # an older index
            raise self._unfit(f"{path.name} has vectors that are not finite")
        if "probed" not in manifest:
            return vectors, {place: base.reconstruct(place) for place in probed(base.ntotal)}
        places = probed(manifest.whole("probed", low=1, high=vectors.places))
        check_regular(self.path / PROBES, self.remedy)
        kept = np.fromfile(self.path / PROBES, dtype="<f4")
        if len(kept) != len(places) * dimension:
            raise self._unfit(f"{PROBES} does not have {len(places)} vectors")
        return vectors, dict(zip(places, kept.reshape(-1, dimension), strict=True))

    def _unfit(self, problem: str) -> R3LiteError:
        return R3LiteError(f"the index {self.path} is damaged: {problem}", self.remedy)


def probed(places: int) -> list[int]:
    """The places of the passages by which an encoder is known again."""
    return sorted({0, places // 2, places - 1})


def digest(path: Path) -> str:
    """SHA-256 of a file; of one larger than READ_WHOLE, of its size and pieces that are evenly spaced in it."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        if size <= READ_WHOLE:
            return hashlib.file_digest(file, "sha256").hexdigest()
        found = hashlib.sha256(str(size).encode())
        for i in range(PIECES):
            file.seek(i * (size - PIECE) // (PIECES - 1))
            found.update(file.read(PIECE))
        return found.hexdigest()


def add(path: Path, opened: PassageIndex, documents: Iterable[Document]) -> tuple[int, int]:
    """Adds the passages that the folder's index lacks; returns how many, and how many it had already.

    Raises R3LiteError if it has another passage of the same id.
    """
    new = {d.id: d for d in documents}
    given = len(new)
    for there in opened.documents:
        if new.pop(there.id, there) != there:
            raise R3LiteError(f"{path} has another passage with the id {there.id!r}", f"Also pass --delete {there.id}")
    if not new:
        return 0, given
    fresh, vectors = list(new.values()), opened.vectors
    made = list(encoded(opened.encoder, fresh))
    folder = Folder(path)
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


def delete(path: Path, ids: Iterable[str]) -> tuple[int, int]:
    """Deletes the passages of these ids; returns how many, and how many had been deleted before, as by a command that
    was killed after that. R3LiteError if one was never there, or none would stay."""
    folder, wanted = Folder(path), set(ids)
    passages, deleted = folder.passages(), folder.deleted()
    numbers = [i for i, document in enumerate(passages) if document.id in wanted]
    absent = wanted - {passages[i].id for i in numbers}
    if absent:
        never = absent - {passages.at(place).id for place in deleted}
        if never:
            raise R3LiteError(f"{path} has no passage with the id {min(never)!r}", "See the ids in its passages.jsonl.")
    if not numbers:
        return 0, len(absent)
    if len(numbers) == len(passages):
        raise R3LiteError(f"no passage of {path} would be left", "Delete the folder instead.")
    after = np.union1d(deleted, [passages.live[i] for i in numbers]).astype("<i8")
    name = f"deleted-{_next(folder)}.bin"
    (path / name).write_bytes(after.tobytes())
    _publish(folder, "deleted", name, Passages(path, len(passages) + len(deleted), after, folder.remedy))
    return len(numbers), len(absent)


def _next(folder: Folder) -> int:
    """The number of an edit, which no file of the index has."""
    return folder.manifest.whole("edit", 0) + 1


def _publish(folder: Folder, replaced: str | tuple[str, ...], name: str, passages: Passages) -> None:
    """Replaces the manifest, in which the file `name` takes the place of those of the roles `replaced`; removes what
    the new one does not name."""
    kept = {kept: value for kept, value in folder.digests.items() if not kept.startswith(replaced)}
    files = {file: value or digest(folder.path / file) for file, value in (kept | {name: None}).items()}
    changed = {"passages": len(passages), "fingerprint": fingerprint(passages), "files": files}
    write_json(folder.path / MANIFEST, folder.manifest.values | changed | {"edit": _next(folder)})
    tidy(folder.path, files)


def tidy(folder: Path, names: Container[str]) -> None:
    """Removes the vectors and deletions that are not those of a manifest: a kill may have come before this."""
    for path in folder.iterdir():
        if PARTS.fullmatch(path.name) and path.name not in names:
            with contextlib.suppress(OSError):  # on Windows a reader may have it open; the next edit removes it
                path.unlink()
