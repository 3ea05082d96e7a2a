"""A FAISS index of a corpus: built in batches, kept in a folder with a manifest, refused when it does not match.

Owns the index folder (`index.faiss`, `passages.jsonl`, `manifest.json`, and what the encoder keeps); knows no model.
The index is flat: up to a million passages that is the best answer, exact and 3 KiB a passage at 768 dimensions.
"""

import json
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
from r3lite.files import check_writable, write_json, write_jsonl
from r3lite.retrieval import corpus
from r3lite.retrieval.encoder import PREFIXES, Encoder, HashingEncoder, reopen_encoder

VERSION = 1
VECTORS, PASSAGES, MANIFEST = "index.faiss", "passages.jsonl", "manifest.json"
BLOCK = 4096  # passages encoded before they are added: bounds the memory beside the index itself


@dataclass
class PassageIndex:
    """Passages, their vectors, and the encoder that made them."""

    encoder: Encoder
    documents: list[Document]
    vectors: faiss.Index

    def search(self, queries: list[str], k: int) -> list[list[Document]]:
        """The `k` nearest passages of each query, nearest first; fewer if the corpus is smaller."""
        if not queries:
            return []
        _, found = self.vectors.search(_float32(self.encoder.encode_queries(queries)), min(k, len(self.documents)))
        return [[self.documents[i] for i in row if i >= 0] for row in found]

    def save(self, folder: str | Path) -> None:
        """Writes the folder whole or not at all; an index that is there already is replaced, other files are not."""
        folder = check_output(folder)
        temporary, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{end}") for end in ("part", "old"))
        try:
            temporary.mkdir()
            faiss.write_index(self.vectors, str(temporary / VECTORS))
            with open(temporary / VECTORS, "rb+") as file:
                os.fsync(file.fileno())
            write_jsonl(temporary / PASSAGES, (d.to_json() for d in self.documents))
            self.encoder.save(temporary)
            write_json(temporary / MANIFEST, self.manifest())
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
    folder, remedy = Path(folder).resolve(), "Name a new or empty folder for --output."
    try:
        check_writable(folder.parent)
        names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    except OSError as error:
        raise R3LiteError(f"the index {folder} cannot be written: {error}", remedy) from error
    if folder == Path.cwd() or folder.is_mount():  # an index is written beside the folder and takes its place
        raise R3LiteError(f"{folder} itself cannot be replaced by an index", "Name a folder in it for --output.")
    if foreign := names - {VECTORS, PASSAGES, MANIFEST, HashingEncoder.FILE}:
        raise R3LiteError(f"{folder} is there and is no index: it holds {min(foreign)}", remedy)
    if names:
        try:
            _read_manifest(folder)
        except R3LiteError as error:
            raise R3LiteError(error.cause, remedy) from error
    return folder


def build(encoder: Encoder, documents: list[Document], progress: bool = True) -> PassageIndex:
    """Encodes the passages, a block at a time, into a new index."""
    vectors = faiss.IndexFlatIP(encoder.dimension)
    with tqdm(total=len(documents), desc="encoding passages", unit="", disable=None if progress else True) as bar:
        for start in range(0, len(documents), BLOCK):
            vectors.add(_float32(encoder.encode_passages(documents[start : start + BLOCK], bar.update)))
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
    kept_style = manifest.get("style", "plain")
    # Asked before the encoder is loaded, which may take long.
    if (encoder_name == "hashing") != (manifest["encoder"] == "hashing"):
        _refuse(
            folder, "encoder", manifest["encoder"], encoder_name, f"Pass --encoder {manifest['encoder']}, or {rebuild}"
        )
    if style not in ("auto", kept_style) and encoder_name != "hashing":
        _refuse(folder, "style", kept_style, style, f"Leave --encoder-style out, or {rebuild} --encoder-style {style}")
    encoder = reopen_encoder(encoder_name, kept_style, folder)
    for key, value in encoder.settings.items():
        # The name may be another one of the same model; its vectors tell, below.
        if key != "encoder" and manifest.get(key) != value:
            _refuse(folder, key, manifest.get(key), value, f"Pass --encoder {manifest['encoder']}, or {rebuild}")
    index = PassageIndex(encoder, _read_passages(folder, rebuild), _read_vectors(folder, rebuild))
    _check_parts(folder, index, manifest, rebuild)
    # The first passage's vector must come out again: tells other weights of the same shape.
    likeness = float(encoder.encode_passages(index.documents[:1], lambda n: None)[0] @ index.vectors.reconstruct(0))
    if likeness < 0.999:
        asked = f"{encoder_name} as it is now: the vectors differ"
        _refuse(folder, "encoder", manifest["encoder"], asked, f"Pass the encoder that it was built with, or {rebuild}")
    return index


def _refuse(folder: Path, what: str, kept, asked, remedy: str) -> NoReturn:
    raise R3LiteError(f"the index {folder} was built with {what} {kept}, not {asked}", remedy)


def _read_manifest(folder: Path) -> dict:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["version"] != VERSION:
            raise ValueError(f"version {manifest['version']} and not {VERSION}")
        if not {"encoder", "dimension", "passages", "fingerprint"} <= manifest.keys():
            raise ValueError("a key is missing")
        if manifest.get("style", "plain") not in PREFIXES:
            raise ValueError(f"style {manifest['style']!r}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = "it is not there" if isinstance(error, FileNotFoundError) else error
        raise R3LiteError(
            f"{folder} is no index that this version reads: {path.name}: {reason}",
            f"Build it: python -m r3lite.index --corpus FILE.jsonl --output {folder}",
        ) from error
    return manifest


def _read_passages(folder: Path, rebuild: str) -> list[Document]:
    try:
        return corpus.read_corpus(folder / PASSAGES)
    except R3LiteError as error:
        raise R3LiteError(error.cause, f"Restore it, or {rebuild}") from error


def _read_vectors(folder: Path, rebuild: str) -> faiss.Index:
    try:
        return faiss.read_index(str(folder / VECTORS))
    except RuntimeError as error:
        raise R3LiteError(f"{folder / VECTORS} cannot be read", f"Restore it, or {rebuild}") from error


def _check_parts(folder: Path, index: PassageIndex, manifest: dict, rebuild: str) -> None:
    problem = None
    if len(index.documents) != manifest["passages"]:
        problem = f"{PASSAGES} holds {len(index.documents)} passages, {manifest['passages']} were indexed"
    elif corpus.fingerprint(index.documents) != manifest["fingerprint"]:
        problem = f"{PASSAGES} has changed since it was indexed"
    elif index.vectors.ntotal != manifest["passages"]:
        problem = f"{VECTORS} holds {index.vectors.ntotal} vectors for {manifest['passages']} passages"
    elif index.vectors.d != manifest["dimension"]:
        problem = f"{VECTORS} has {index.vectors.d} dimensions and not {manifest['dimension']}"
    if problem:
        raise R3LiteError(f"the index {folder} does not fit together: {problem}", f"Restore it, or {rebuild}")


def _float32(vectors: np.ndarray) -> np.ndarray:
    """FAISS raises TypeError at float64 and wants rows that lie one after the other."""
    return np.ascontiguousarray(vectors, dtype=np.float32)
