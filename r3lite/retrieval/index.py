"""A FAISS index of a corpus: built in batches, kept in a folder with a manifest, refused when it does not match.

Owns the index folder (`index.faiss`, `passages.jsonl`, `manifest.json`, what the encoder keeps, and of documents
`skipped.jsonl`); knows no model.
The index is flat: up to a million passages that is the best answer, exact and 3 KiB a passage at 768 dimensions.
"""

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import faiss
import numpy as np
from tqdm import tqdm

from r3lite.episode import Document
from r3lite.errors import R3LiteError
from r3lite.files import check_regular, check_writable, read_record, write_json, write_jsonl
from r3lite.records import Record
from r3lite.retrieval import corpus
from r3lite.retrieval.encoder import HASHING, PREFIXES, Encoder, HashingEncoder, reopen_encoder
from r3lite.retrieval.search import best, found

VERSION = 1
VECTORS, PASSAGES, MANIFEST = "index.faiss", "passages.jsonl", "manifest.json"
SKIPPED = "skipped.jsonl"  # what a folder of documents holds besides; no search needs it
FURTHEST = 0.045  # of a vector from what the same encoder makes of its passage: a cosine of 0.999
BLOCK = 4096  # passages encoded before they are added: bounds the memory beside the index itself


@dataclass
class PassageIndex:
    """Passages, their vectors, and the encoder that made them."""

    encoder: Encoder
    documents: list[Document]
    vectors: faiss.Index

    def search(self, queries: list[str], k: int, own: list[tuple[int, ...]] | None = None) -> list[list[Document]]:
        """The `k` nearest passages of each query, nearest first; of the places in `own[i]` only, for query i, if given.

        Fewer if there are not so many; none for a query without any word that a hashing encoder knows: its vector is
        zero, and all are as near.
        """
        if not queries:
            return []
        vectors = _float32(self.encoder.encode_queries(queries))
        if own is None:
            scores, places = self.vectors.search(vectors, min(k, len(self.documents)))
        else:
            scores, places = [], []
            for vector, mine in zip(vectors, own, strict=True):
                products = self.vectors.reconstruct_batch(np.array(mine, dtype=np.int64)) @ vector
                order = best(products, k)
                scores.append(products[order])
                places.append(np.array(mine)[order])
        known = vectors.any(axis=1)
        return [found(self.documents, p, s, "semantic") if any_ else [] for p, s, any_ in zip(places, scores, known)]

    def save(self, folder: str | Path) -> None:
        """Writes the folder whole or not at all; it may take the place of what `check_output` says."""
        folder = check_output(folder)
        replaces(folder, self.encoder, self.documents)
        temporary, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{end}") for end in ("part", "old"))
        try:
            temporary.mkdir()
            try:
                faiss.write_index(self.vectors, str(temporary / VECTORS))
            except RuntimeError as error:  # what FAISS makes of a full disk
                reason = str(error).strip().splitlines()[-1]
                remedy = "Make room, or name another --output."
                raise R3LiteError(f"the index {folder} cannot be written: {reason}", remedy) from error
            with open(temporary / VECTORS, "rb+") as file:
                os.fsync(file.fileno())
            write_jsonl(temporary / PASSAGES, (d.to_json() for d in self.documents))
            self.encoder.save(temporary)
            write_json(temporary / MANIFEST, self.manifest() | {"vectors": _digest(temporary / VECTORS)})
            if folder.exists():
                folder.rename(old)
            temporary.rename(folder)
        finally:
            if old.exists() and not folder.exists():
                old.rename(folder)  # the new one did not come into its place
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)

    def manifest(self) -> dict:
        counts = {"version": VERSION, "passages": len(self.documents)}
        return counts | {"fingerprint": corpus.fingerprint(self.documents)} | self.encoder.settings


def check_output(folder: str | Path) -> Path:
    """The full path of the folder, where an index may be written: it is new, empty, or an index and nothing else.

    Makes the folders above it, so that encoding, which may take hours, does not begin where nothing can be written.
    """
    remedy = "Name a new or empty folder for --output."
    try:
        folder = Path(folder).resolve()
        check_writable(folder.parent)
        names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    except (OSError, ValueError) as error:  # ValueError: a name that no folder can have
        raise R3LiteError(f"the index {folder} cannot be written: {error}", remedy) from error
    if folder == Path.cwd() or folder.is_mount():  # an index is written beside the folder and takes its place
        raise R3LiteError(f"{folder} itself cannot be replaced by an index", "Name a folder in it for --output.")
    if foreign := names - {VECTORS, PASSAGES, MANIFEST, SKIPPED, HashingEncoder.FILE}:
        raise R3LiteError(f"{folder} is there and is no index: it holds {min(foreign)}", remedy)
    if names:
        try:
            _read_manifest(folder)
        except R3LiteError as error:
            raise R3LiteError(error.cause, remedy) from error
    return folder


def replaces(folder: str | Path, encoder: Encoder, documents: list[Document]) -> bool:
    """Whether a folder of `check_output` holds an index already; R3LiteError if of another corpus or encoder."""
    folder, remedy = Path(folder), "Name another --output, or remove that index first."
    if not (folder / MANIFEST).exists():
        return False
    kept = _read_manifest(folder)
    for key in ("encoder", "style"):
        if kept.text(key, None) != encoder.settings.get(key):
            then, now = kept.text(key, None), encoder.settings.get(key)
            raise R3LiteError(f"{folder} holds an index with {key} {then}, not {now}", remedy)
    if kept.text("fingerprint") != corpus.fingerprint(documents):
        raise R3LiteError(f"{folder} holds an index of another corpus, or of this one before it was changed", remedy)
    return True


def build(encoder: Encoder, documents: list[Document], progress: bool = True) -> PassageIndex:
    """Encodes the passages, a block at a time, into a new index."""
    vectors = faiss.IndexFlatIP(encoder.dimension)
    with tqdm(total=len(documents), desc="encoding passages", unit="", disable=None if progress else True) as bar:
        for start in range(0, len(documents), BLOCK):
            made = _float32(encoder.encode_passages(documents[start : start + BLOCK], bar.update))
            if not np.isfinite(made).all():
                raise R3LiteError(
                    f"the encoder {encoder.settings['encoder']} gives vectors that are not finite",
                    "Its weights may be damaged: fetch them again, or use another --encoder.",
                )
            vectors.add(made)
    return PassageIndex(encoder, documents, vectors)


def load(folder: str | Path, encoder_name: str, style: str = "auto") -> PassageIndex:
    """The index of a folder, for queries on the CPU.

    Raises R3LiteError if it was made by another encoder or style than is asked for (style auto takes the index's own),
    or if its parts do not belong together.
    """
    folder = Path(folder)
    manifest = _read_manifest(folder)
    rebuild = (
        f"build the index again: python -m r3lite.index --corpus FILE.jsonl --encoder {encoder_name} --output {folder}"
    )
    kept_encoder, kept_style = manifest.text("encoder"), manifest.text("style", "plain")
    # Asked before the encoder is loaded, which may take long.
    if (encoder_name == HASHING) != (kept_encoder == HASHING):
        _refuse(folder, "encoder", kept_encoder, encoder_name, f"Pass --encoder {kept_encoder}, or {rebuild}")
    if style not in ("auto", kept_style) and encoder_name != HASHING:
        _refuse(folder, "style", kept_style, style, f"Leave --encoder-style out, or {rebuild} --encoder-style {style}")
    encoder = reopen_encoder(encoder_name, kept_style, folder)
    for key, value in encoder.settings.items():
        # The name may be another one of the same model; its vectors tell, below.
        if key != "encoder" and manifest.values.get(key) != value:
            _refuse(folder, key, manifest.values.get(key), value, f"Pass --encoder {kept_encoder}, or {rebuild}")
    index = PassageIndex(encoder, _read_passages(folder, manifest, rebuild), _read_vectors(folder, manifest, rebuild))
    _check_vectors(folder, index.vectors, manifest, rebuild)
    # Some passages' vectors must come out again: this tells other weights of the same shape, and another order.
    some = sorted({0, len(index.documents) // 2, len(index.documents) - 1})
    fresh = encoder.encode_passages([index.documents[i] for i in some], lambda n: None)
    distances = np.linalg.norm(fresh - np.stack([index.vectors.reconstruct(i) for i in some]), axis=1)
    if not distances.max() <= FURTHEST:  # nor if it is NaN
        asked = f"{encoder_name} as it is now: the vectors differ"
        _refuse(folder, "encoder", kept_encoder, asked, f"Pass the encoder that it was built with, or {rebuild}")
    return index


def _refuse(folder: Path, what: str, kept, asked, remedy: str) -> NoReturn:
    raise R3LiteError(f"the index {folder} was built with {what} {kept}, not {asked}", remedy)


def _read_manifest(folder: Path) -> Record:
    remedy = f"Build it: python -m r3lite.index --corpus FILE.jsonl --output {folder}"
    try:
        manifest = read_record(folder / MANIFEST, remedy)
        if (version := manifest.whole("version")) != VERSION:
            raise manifest.error(f"version {version} and not {VERSION}")
        for key in ("encoder", "fingerprint"):
            manifest.text(key)
        for key in ("dimension", "passages"):
            manifest.whole(key, low=1)
        manifest.choice("style", PREFIXES, "plain")
    except R3LiteError as error:
        raise R3LiteError(f"{folder} is no index that this version reads: {error.cause}", remedy) from error
    return manifest


def read_documents(folder: str | Path) -> list[Document]:
    """The passages of an index, without its vectors and encoder."""
    folder = Path(folder)
    rebuild = f"build the index again: python -m r3lite.index --corpus FILE.jsonl --output {folder}"
    return _read_passages(folder, _read_manifest(folder), rebuild)


def _read_passages(folder: Path, manifest: Record, rebuild: str) -> list[Document]:
    try:
        documents = corpus.read_corpus(folder / PASSAGES)
    except R3LiteError as error:
        raise R3LiteError(error.cause, f"Restore it, or {rebuild}") from error
    if len(documents) != (passages := manifest.whole("passages")):
        raise _unfit(folder, f"{PASSAGES} holds {len(documents)} passages, {passages} were indexed", rebuild)
    if corpus.fingerprint(documents) != manifest.text("fingerprint"):
        raise _unfit(folder, f"{PASSAGES} has changed since it was indexed", rebuild)
    return documents


def _read_vectors(folder: Path, manifest: Record, rebuild: str) -> faiss.Index:
    path, remedy = folder / VECTORS, f"Restore it, or {rebuild}"
    check_regular(path, remedy)  # FAISS would wait for a pipe for ever
    if "vectors" in manifest and manifest.text("vectors") != _digest(path):  # older indexes have no digest
        raise R3LiteError(f"{path} has changed since it was written", remedy)
    try:
        vectors = faiss.read_index(str(path))
    except (RuntimeError, MemoryError) as error:
        raise R3LiteError(f"{path} cannot be read", remedy) from error
    if not isinstance(vectors, faiss.IndexFlatIP):
        raise R3LiteError(f"{path} is a {type(vectors).__name__}, not an IndexFlatIP", remedy)
    return vectors


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_vectors(folder: Path, vectors: faiss.Index, manifest: Record, rebuild: str) -> None:
    passages, dimension, problem = manifest.whole("passages"), manifest.whole("dimension"), None
    if vectors.ntotal != passages:
        problem = f"holds {vectors.ntotal} vectors for {passages} passages"
    elif vectors.d != dimension:
        problem = f"has {vectors.d} dimensions and not {dimension}"
    elif not _finite(vectors):
        problem = "holds vectors that are not finite"
    if problem:
        raise _unfit(folder, f"{VECTORS} {problem}", rebuild)


def _unfit(folder: Path, problem: str, rebuild: str) -> R3LiteError:
    return R3LiteError(f"the index {folder} does not fit together: {problem}", f"Restore it, or {rebuild}")


def _finite(vectors: faiss.Index) -> bool:
    starts = range(0, vectors.ntotal, BLOCK)
    return all(np.isfinite(vectors.reconstruct_n(i, min(BLOCK, vectors.ntotal - i))).all() for i in starts)


def _float32(vectors: np.ndarray) -> np.ndarray:
    """FAISS raises TypeError at float64 and wants rows that lie one after the other."""
    return np.ascontiguousarray(vectors, dtype=np.float32)
