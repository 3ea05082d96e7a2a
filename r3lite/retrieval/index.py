"""A FAISS index of a corpus, kept in a folder with a manifest, searched, and refused if it does not fit the settings.

Owns the index folder and its manifest. `building.py` writes a folder; here passages are added and deleted without
building it again, while other processes may read it. Added passages are appended to the file of passages, and their
vectors to a flat index beside the main index; once there are many, they move into the main index. Deleted passages
stay in their place, and searches leave them out. Files of vectors are written under new names; then the manifest is
replaced, and only then the files that it no longer names are removed. So a reader sees the folder before an edit or
after it, never a mixture. The files of a folder:

passages.jsonl, ends.bin       the passages, and where their lines end (`corpus.py`)
index.faiss or index-N.faiss   their vectors (`vectors.py`)
added-N.faiss, deleted-N.bin   the vectors added since, and the places of deleted passages, if any, as of edit N
probes.bin                     some of the vectors in fp32: an index may keep less
manifest.json                  the encoder and style, and which of these files belong together
words.json, skipped.jsonl      the words of the hashing encoder; the files of a folder of documents that were left out

An older folder has a flat index, no `ends.bin` or `probes.bin`, and no table of files in its manifest; it is read as it
is.
"""

import contextlib
import hashlib
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import faiss
import numpy as np
from tqdm import tqdm

from r3lite.core.bars import TimedLines
from r3lite.core.episode import Document
from r3lite.core.errors import R3LiteError, explained
from r3lite.core.files import PIECE, PIECES, check_regular, read_record, write_bytes, write_json
from r3lite.core.inherited import MANIFEST
from r3lite.core.records import Record
from r3lite.retrieval.conventions import STYLES
from r3lite.retrieval.corpus import ENDS, PASSAGES, Passages, fingerprint, write_passages
from r3lite.retrieval.encoder import HASHING, Encoder, EncoderSettings, HashingEncoder, make_encoder
from r3lite.retrieval.search import best, with_scores
from r3lite.retrieval.vectors import BLOCK, CLASSES, Vectors, add_vectors, blocks_of, open_vectors, write_vectors
from r3lite.settings.retrieval import BUILD

VERSION = 1
VECTORS = "index.faiss"
PROBES = "probes.bin"
SKIPPED = "skipped.jsonl"  # the files of a folder of documents that were left out; no search needs it
INDEX_FILES = {PASSAGES, ENDS, MANIFEST, PROBES, SKIPPED, HashingEncoder.FILE}
VECTOR_FILES = re.compile(r"index(-\d+)?\.faiss|added-\d+\.faiss|deleted-\d+\.bin")
# The largest distance allowed between a stored and a re-encoded vector, relative to the length of the stored one. Two
# vectors of equal length have this distance if their cosine is 0.999.
MAX_DISTANCE = 0.045
READ_WHOLE = 1 << 30  # the most bytes of a file whose digest covers all of it
COMPARED = 1_000_000  # the most passages that are compared with their fingerprint; with more, none are
# How many vectors may stand beside the main index: this many, or a tenth of the main index's if that is more. Beyond
# that they move into it.
ADDED_LIMIT = 10_000
T = TypeVar("T")


@dataclass
class PassageIndex:
    """Passages, their vectors, and the encoder that made them."""

    encoder: Encoder
    documents: Sequence[Document]
    vectors: Vectors

    def search(
        self,
        queries: list[str],
        k: int,
        own_places: list[tuple[int, ...]] | None = None,
    ) -> list[list[Document]]:
        """Returns the `k` nearest passages of each query, nearest first.

        With `own_places`, query i finds only the passages at the places `own_places[i]`. There are fewer than `k` if
        the query can find fewer, and none for a query without a word that a hashing encoder knows: its vector is zero,
        and all passages would be equally near.
        """
        if not queries:
            return []
        vectors = self.encoder.encode_queries(queries)
        if own_places is None:
            nearest = self.vectors.search(vectors, k)
        else:
            pairs = zip(vectors, own_places, strict=True)
            nearest = [self._search_places(vector, places, k) for vector, places in pairs]
        rankings = []
        for vector, (scores, indices) in zip(vectors, nearest):  # indices in `documents`
            ranking = []
            if vector.any():  # else no word of the query is known
                ranking = with_scores(self.documents, indices, scores=scores, source="semantic")
            rankings.append(ranking)
        return rankings

    def _search_places(
        self,
        vector: np.ndarray,
        candidates: tuple[int, ...],
        k: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns scores and places of the `k` vectors nearest to `vector` [d] among those at the places `candidates`.

        The index must be flat, as `build_index` makes it.
        """
        places = np.array(candidates, dtype=np.int64)
        products = self.vectors.base.reconstruct_batch(places) @ vector
        order = best(products, k)
        return products[order], places[order]

    def only(self, mask: np.ndarray) -> "PassageIndex":
        """Returns the index of those passages for which `mask` [N] is true, without copying vectors.

        The index must have been read from a folder: then its documents are `Passages`.
        """
        return replace(self, documents=self.documents.only(mask), vectors=self.vectors.only(mask))


def build_index(encoder: Encoder, documents: list[Document]) -> PassageIndex:
    """Encodes the passages, a block at a time, and returns a new flat index of them in memory."""
    vectors = faiss.IndexFlatIP(encoder.dimension)
    add_vectors(vectors, encoded(encoder, documents))
    return PassageIndex(encoder, documents, Vectors(vectors))


def encoded(
    encoder: Encoder,
    documents: Sequence[Document],
    start: int = 0,
) -> Iterator[np.ndarray]:
    """Yields vectors [N, d] of the passages from `start` on, a block at a time.

    Raises R3LiteError if one is not finite.
    """
    with tqdm(total=len(documents), initial=start, desc="encoding passages", unit="", disable=None) as bar:
        lines = TimedLines(bar, "encoding", "passages")
        for i in range(start, len(documents), BLOCK):
            vectors = encoder.encode_passages(documents[i : i + BLOCK], lines.update)
            if not np.isfinite(vectors).all():
                cause = f"the encoder {encoder.settings['encoder']} computes vectors that are not finite"
                raise R3LiteError(
                    cause,
                    "Its weights may be damaged: download them again, or pass another --encoder.",
                    code="encoder-not-finite",
                )
            yield vectors


def load(
    path: Path,
    settings: EncoderSettings,
    device: str = "cpu",
    batch_size: int = 32,
    loaded_encoder: Encoder | None = None,
) -> PassageIndex:
    """Returns the index of a folder; its vectors are read as searches need them.

    `loaded_encoder` is an encoder of the settings' name. It is used if its style is that of the index; otherwise the
    encoder is loaded.
    Raises R3LiteError if the index has another encoder or style than the settings name (style auto takes that
    of the index), or if its parts do not belong together.
    """
    manifest = read_manifest(path)
    name = settings.encoder
    rebuild = _rebuild(name)
    index_encoder = manifest.text("encoder")
    index_style = manifest.text("style", "plain")
    _check_names(path, settings, index_encoder=index_encoder, index_style=index_style)
    if name == HASHING:
        encoder = HashingEncoder.load(path)
    elif loaded_encoder and loaded_encoder.settings.get("style") == index_style:
        encoder = loaded_encoder
    else:
        encoder = make_encoder(
            replace(settings, encoder_style=index_style),
            documents=(),
            device=device,
            batch_size=batch_size,
        )
    for key, value in encoder.settings.items():
        # Another name may be that of the same model, and another dtype may give the same vectors: see below.
        if key not in ("encoder", "dtype") and manifest.values.get(key) != value:
            difference = f"{key} {manifest.values.get(key)}, not {value}"
            raise _mismatch(path, difference, f"Pass --encoder {index_encoder}, or {rebuild}")
    # One call reads all parts, so that they are of one state of the folder, which another process may edit.
    # `probes` are some of the stored vectors, by their places.
    passages, (vectors, probes) = consistent(path, lambda folder: (folder.passages(), folder.vectors()))
    # The passages of the probes are encoded again: if the weights or the order of passages differ, so do the vectors.
    probe_passages = [passages.at(place) for place in probes]
    recomputed = encoder.encode_passages(probe_passages, lambda n: None)
    if not same_vectors(recomputed, np.stack(list(probes.values()))):
        difference = f"encoder {index_encoder}, not this version of {name}: the vectors differ"
        raise _mismatch(path, difference, f"Pass the encoder that it was built with, or {rebuild}")
    return PassageIndex(encoder, passages, vectors)


def _check_names(
    path: Path,
    settings: EncoderSettings,
    index_encoder: str,
    index_style: str,
) -> None:
    """Raises R3LiteError if either the settings or the index name hashing, but not both, or if the styles differ.

    --encoder-style auto fits any style; styles do not matter to hashing. Called before the encoder is loaded, which may
    take long.
    """
    name = settings.encoder
    style = settings.encoder_style
    rebuild = _rebuild(name)
    is_hashing = name == HASHING
    if is_hashing != (index_encoder == HASHING):
        difference = f"encoder {index_encoder}, not {name}"
        raise _mismatch(path, difference, f"Pass --encoder {index_encoder}, or {rebuild}")
    if style not in ("auto", index_style) and not is_hashing:
        difference = f"style {index_style}, not {style}"
        raise _mismatch(path, difference, f"Remove --encoder-style, or {rebuild} --encoder-style {style}")


def _rebuild(encoder: str) -> str:
    """Returns the advice to build an index with an encoder."""
    return f"build a new index: {BUILD} --encoder {encoder} --output ANOTHER_FOLDER"


def same_vectors(recomputed: np.ndarray, stored: np.ndarray) -> bool:
    """Returns True if the `recomputed` vectors [N, d] differ from the `stored` ones by at most the allowed distance.

    That is MAX_DISTANCE times the length of the stored vector, or times 1 if that is more. Returns False if a number is
    NaN, with which every comparison is false.
    """
    lengths = np.maximum(np.linalg.norm(stored, axis=1), 1)  # a text without a known word has the length 0
    distances = np.linalg.norm(recomputed - stored, axis=1)
    return bool((distances <= MAX_DISTANCE * lengths).all())


def _mismatch(path: Path, difference: str, remedy: str) -> R3LiteError:
    return R3LiteError(f"the index {path} was built with {difference}", remedy, code="index-setting-differs")


def read_documents(path: Path) -> Passages:
    """Returns the passages of an index, without its vectors and encoder."""
    return consistent(path, lambda folder: folder.passages())


def consistent(path: Path, read: Callable[["IndexFolder"], T]) -> T:
    """Returns what `read` returns for an index folder, all of it from one state of the folder.

    An edit by another process may remove files before `read` opens them; then `read` is called again.
    """
    folder = IndexFolder(path)
    while True:
        try:
            return read(folder)
        except (R3LiteError, OSError):
            current = IndexFolder(path)
            if current.manifest.values == folder.manifest.values:
                raise  # no edit came between: the index itself is at fault
            folder = current


def read_manifest(path: Path) -> Record:
    """Returns the manifest of an index folder. Keys that an older index lacks are filled in.

    Raises R3LiteError if it is not the manifest of an index of this version.
    """
    remedy = f"Build one in a new folder: {BUILD} --output FOLDER"
    with explained(R3LiteError, f"{path} is not an index, or not of this version", remedy, code="not-an-index"):
        manifest = read_record(path / MANIFEST, remedy)
        version = manifest.whole("version")
        if version != VERSION:
            raise manifest.error(f"version {version}, not {VERSION}")
        for key in ("encoder", "fingerprint"):
            manifest.text(key)
        for key in ("dimension", "passages"):
            manifest.whole(key, low=1)
        # An older index names neither style nor kind nor files: it is plain and flat, and its only file may have a
        # digest under "vectors".
        manifest.values.setdefault("style", "plain")
        manifest.choice("style", STYLES)
        manifest.values.setdefault("kind", "flat")
        manifest.values.setdefault("files", {VECTORS: manifest.text("vectors", None)})
        manifest.choice("kind", CLASSES)
        for name in manifest.record("files").values:
            if not VECTOR_FILES.fullmatch(name):
                raise manifest.error(f"{name!r} is not a file of an index")
    return manifest


class IndexFolder:
    """An index folder as its manifest describes it now. Raises R3LiteError if a file does not belong to it."""

    def __init__(self, path: Path):
        self.path = path
        self.manifest = read_manifest(path)
        encoder = self.manifest.text("encoder")
        files = self.manifest.record("files")
        self.remedy = f"Restore it, or build the index again: {BUILD} --encoder {encoder} --output {path}"
        self.digests = {name: files.text(name, None) for name in files.values}  # older indexes have none

    def file(self, role: str) -> Path | None:
        """Returns the file of a role, checked by its digest; None if there is none.

        A role is how the names of its files begin: "index", "added" or "deleted".
        """
        name = next((name for name in self.digests if name.startswith(role)), None)
        if name is None:
            return None
        path = self.path / name
        check_regular(path, self.remedy)  # FAISS would wait for a pipe for ever
        expected = self.digests[name]
        # Without a digest, as of an older index, the file is taken as it is.
        if expected is not None and expected != digest(path):
            raise R3LiteError(f"{path} has changed since it was written", self.remedy, code="index-file-changed")
        return path

    def deleted(self) -> np.ndarray:
        """Returns the places of deleted passages, sorted."""
        path = self.file("deleted")
        return np.fromfile(path, dtype="<i8") if path else np.empty(0, np.int64)

    def passages(self) -> Passages:
        """Returns the passages.

        Raises R3LiteError if the files have fewer than the manifest says, or if up to COMPARED passages have another
        fingerprint.
        """
        deleted = self.deleted()
        places = self.manifest.whole("passages") + len(deleted)  # the manifest counts live passages only
        passages = Passages(self.path, places=places, deleted=deleted, remedy=self.remedy)
        if len(passages) <= COMPARED and fingerprint(passages) != self.manifest.text("fingerprint"):
            raise self._damaged(f"{PASSAGES} has changed since it was indexed")
        return passages

    def vectors(self) -> tuple[Vectors, dict[int, np.ndarray]]:
        """Returns the vectors of the index, and its probes: some of the vectors in fp32, by their places."""
        path = self.file("index")
        added_path = self.file("added")
        base = open_vectors(path, self.manifest.text("kind"), self.remedy)
        added = open_vectors(added_path, "flat", self.remedy) if added_path else None
        vectors = Vectors(base, added, self.deleted())
        dimension = self.manifest.whole("dimension")
        passages = self.manifest.whole("passages")
        live = vectors.places - len(vectors.deleted)
        if live != passages:
            raise self._damaged(f"{path.name} has {live} vectors for {passages} passages")
        if base.d != dimension:
            raise self._damaged(f"{path.name} has {base.d} dimensions, not {dimension}")
        is_older = None in self.digests.values()
        if is_older and not all(np.isfinite(block).all() for block in blocks_of(base)):
            raise self._damaged(f"{path.name} has vectors that are not finite")
        return vectors, self._probes(vectors, dimension)

    def _probes(self, vectors: Vectors, dimension: int) -> dict[int, np.ndarray]:
        """Returns some vectors [d] by their places: as the encoder made them, or as an older index stores them."""
        if "probed" not in self.manifest:
            base = vectors.base
            return {place: base.reconstruct(place) for place in probe_places(base.ntotal)}
        # "probed" is how many passages the index had when its probes were written.
        places = probe_places(self.manifest.whole("probed", low=1, high=vectors.places))
        check_regular(self.path / PROBES, self.remedy)
        numbers = np.fromfile(self.path / PROBES, dtype="<f4")
        if len(numbers) != len(places) * dimension:
            raise self._damaged(f"{PROBES} does not have {len(places)} vectors")
        return dict(zip(places, numbers.reshape(-1, dimension), strict=True))

    def _damaged(self, problem: str) -> R3LiteError:
        return R3LiteError(f"the index {self.path} is damaged: {problem}", self.remedy, code="index-damaged")


def probe_places(count: int) -> list[int]:
    """Returns the places of the passages by which an encoder is recognized: first, middle and last of `count`."""
    return sorted({0, count // 2, count - 1})


def digest(path: Path) -> str:
    """Returns the SHA-256 of a file; if it has more than READ_WHOLE bytes, of its size and of evenly spaced pieces."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        if size <= READ_WHOLE:
            return hashlib.file_digest(file, "sha256").hexdigest()
        sha256 = hashlib.sha256(str(size).encode())
        for i in range(PIECES):
            file.seek(i * (size - PIECE) // (PIECES - 1))
            sha256.update(file.read(PIECE))
        return sha256.hexdigest()


def add(path: Path, opened: PassageIndex, documents: Iterable[Document]) -> tuple[int, int]:
    """Adds those of `documents` that the index lacks; returns how many it lacked and how many it had already.

    `opened` is the index of the folder `path`. Raises R3LiteError if it has another passage with one of the ids.
    """
    new_by_id = {document.id: document for document in documents}
    count = len(new_by_id)
    for existing in opened.documents:
        new_document = new_by_id.pop(existing.id, None)  # what the index has is not new
        if new_document is not None and new_document != existing:
            cause = f"{path} has another passage with the id {existing.id!r}"
            raise R3LiteError(cause, f"Also pass --delete {existing.id}", code="passage-id-taken")
    if not new_by_id:
        return 0, count
    new = list(new_by_id.values())
    vectors = opened.vectors
    new_vectors = list(encoded(opened.encoder, new))
    folder = IndexFolder(path)
    added = faiss.IndexFlatIP(vectors.base.d)
    if vectors.added:
        add_vectors(added, [vectors.added.reconstruct_n(0, vectors.added.ntotal)])
    add_vectors(added, new_vectors)
    write_passages(path, new, vectors.places)
    if added.ntotal > max(ADDED_LIMIT, vectors.base.ntotal // 10):
        # A new main index, with the added vectors in it, replaces the main index and the index beside it.
        kind = folder.manifest.text("kind")
        base = open_vectors(folder.file("index"), kind, folder.remedy, mapped=False)
        add_vectors(base, blocks_of(added))
        name = f"index-{_next_edit(folder)}.faiss"
        write_vectors(base, path / name)
        replaced = ("index", "added")
    else:
        # A new index of all added vectors replaces the one beside the main index.
        name = f"added-{_next_edit(folder)}.faiss"
        write_vectors(added, path / name)
        replaced = ("added",)
    passages = Passages(path, places=vectors.places + len(new), deleted=vectors.deleted, remedy=folder.remedy)
    _publish(folder, replaced, name=name, passages=passages)
    return len(new), count - len(new)


def delete(path: Path, ids: Iterable[str]) -> tuple[int, int]:
    """Deletes the passages of these ids; returns how many it deleted, and how many of the ids were deleted before.

    Ids that were deleted before are accepted, so that a command that was killed can be repeated. Raises R3LiteError if
    an id was never in the index, or if no passage would be left.
    """
    folder = IndexFolder(path)
    id_set = set(ids)
    passages = folder.passages()
    deleted = folder.deleted()
    # `passages` numbers the live passages without gaps; a place is a line of the file, and deleted passages have one.
    live_numbers = [i for i, document in enumerate(passages) if document.id in id_set]
    absent = id_set - {passages[i].id for i in live_numbers}
    if absent:
        never = absent - {passages.at(place).id for place in deleted}
        if never:
            raise R3LiteError(
                f"{path} has no passage with the id {min(never)!r}",
                "See the ids in its passages.jsonl.",
                code="passage-id-absent",
            )
    if not live_numbers:
        return 0, len(absent)
    if len(live_numbers) == len(passages):
        raise R3LiteError(
            f"no passage of {path} would be left", "Delete the folder instead.", code="index-would-be-empty"
        )
    newly_deleted = [passages.live[i] for i in live_numbers]
    all_deleted = np.union1d(deleted, newly_deleted).astype("<i8")
    name = f"deleted-{_next_edit(folder)}.bin"
    write_bytes(path / name, all_deleted.tobytes())
    remaining = Passages(
        path,
        places=len(passages) + len(deleted),
        deleted=all_deleted,
        remedy=folder.remedy,
    )
    _publish(folder, ("deleted",), name=name, passages=remaining)
    return len(live_numbers), len(absent)


def _next_edit(folder: IndexFolder) -> int:
    """Returns the number of the next edit; no file of the index has it in its name yet."""
    return folder.manifest.whole("edit", 0) + 1


def _publish(
    folder: IndexFolder,
    replaced: tuple[str, ...],
    name: str,
    passages: Passages,
) -> None:
    """Replaces the manifest, then removes the files that the new one does not name.

    In the new manifest, the file `name` takes the place of the files of the roles `replaced`.
    """
    files = {}
    for file, file_digest in folder.digests.items():
        if not file.startswith(replaced):
            files[file] = file_digest or digest(folder.path / file)
    files[name] = digest(folder.path / name)
    changes = {
        "passages": len(passages),
        "fingerprint": fingerprint(passages),
        "files": files,
        "edit": _next_edit(folder),
    }
    write_json(folder.path / MANIFEST, folder.manifest.values | changes)
    tidy(folder.path, files)


def tidy(folder: Path, names: Container[str]) -> None:
    """Removes files of vectors and deletions that a manifest does not name: a kill may have left them."""
    for path in folder.iterdir():
        if VECTOR_FILES.fullmatch(path.name) and path.name not in names:
            with contextlib.suppress(OSError):  # on Windows a reader may have it open; the next edit removes it
                path.unlink()
