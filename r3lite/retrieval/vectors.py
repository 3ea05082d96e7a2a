"""The vectors of an index, by FAISS: how large each kind becomes, built of a file of vectors, opened memory-mapped,
searched without deleted ones.

Owns what each kind is in FAISS and its parameters; knows no passages and no folder's layout. Similarity is the inner
product. Shapes: `Q` queries, `k` results, `d` dimensions.

The kinds, and what they keep of a vector of d dimensions:
flat        the vector, fp32: 4 d bytes; exact, reads all of them for a query
sq8         8 bits a dimension: d bytes; nearly exact, reads all of them for a query
hnsw        the vector and a graph of its neighbours (arXiv 1603.09320): 4 d + 272 bytes; fast, slow to build
ivf-sq8     sq8 in lists by the nearest of many centroids: d + 8 bytes; a query reads 1 list of 32
opq-ivf-pq  the same lists, a byte for each 8 dimensions of the rotated vector (OPQ, CVPR 2013): d / 8 + 8 bytes
"""

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import faiss
import numpy as np
from tqdm import tqdm

from r3lite.core.bars import BRIEF
from r3lite.core.errors import R3LiteError, explained

MANY = 1_000_000  # passages; above, `auto` reads a part of the index for a query and not all of it
LINKS = 32  # of a vector in the graph of hnsw, twice as many on its lowest level
SUBSPACE = 8  # dimensions that are one byte in opq-ivf-pq
SAMPLE_BYTES = 512 << 20  # most fp32 vectors that an index is trained on
LEAST = 39  # training vectors of a centroid, below which FAISS warns
BLOCK = 4096  # passages encoded, and vectors added, at a time
GROWTH = 1.5  # memory of lists that grow by doubling, while they are built, to their content
CODEWORDS = 256  # of a byte of opq-ivf-pq
DISTANCES = 4 * 4096 * 1024  # bytes of the inner products that FAISS holds at a time while it finds lists
IVF = ("ivf-sq8", "opq-ivf-pq")
CLASSES = {
    "flat": "IndexFlatIP",
    "sq8": "IndexScalarQuantizer",
    "hnsw": "IndexHNSWFlat",
    "ivf-sq8": "IndexIVFScalarQuantizer",
    "opq-ivf-pq": "IndexPreTransform",
}
CONSTRUCTION, SEARCH = 80, 96  # candidates of hnsw that are kept for a vector's links, and for a query
PROBES = 32  # a query reads 1 / PROBES of the lists, but at least 16
ROUNDS = 4  # of OPQ: rotation and codewords in turns


def lists_of(passages: int, dimension: int) -> int:
    """Number of lists of an inverted file: the power of two nearest to 4 sqrt(N), fewer if the sample is too small."""
    wanted = 1 << round(math.log2(4 * math.sqrt(passages)))
    most = max(1, min(passages, SAMPLE_BYTES // (4 * dimension)) // LEAST)
    return min(wanted, 1 << (most.bit_length() - 1))


def sample_of(kind: str, passages: int, dimension: int) -> int:
    """Number of vectors that an index of a kind is trained on: 40 a list, and enough for 256 centroids a byte."""
    if kind not in (*IVF, "sq8"):
        return 0
    wanted = max((LEAST + 1) * lists_of(passages, dimension), 16384)
    return min(passages, wanted, max(1, SAMPLE_BYTES // (4 * dimension)))


def item_bytes(kind: str) -> int:
    """Bytes of a number of the vectors that wait on the disk: fp16 if the kind itself keeps less."""
    return 4 if kind in ("flat", "hnsw") else 2


@dataclass(frozen=True)
class Estimate:
    """What an index will take, in bytes."""

    kind: str
    passages: int
    dimension: int
    file: int  # of the vectors in the folder
    search: int  # in memory once all of it was read: the file, and where each passage is
    build: int  # in memory at the most while it is built, beside the encoder
    scratch: int  # on the disk while it is built

    def summary(self) -> str:
        to_build = f"{_size(self.build)} to build, without the encoder, and {_size(self.scratch)} of disk meanwhile"
        return f"{self.kind}, {self.passages:,} x {self.dimension}: {_size(self.search)} to search, {to_build}"


def estimate(kind: str, passages: int, dimension: int) -> Estimate:
    """What an index of a kind will take."""
    n, d, lists = passages, dimension, lists_of(passages, dimension)
    rotated = dimension // SUBSPACE * SUBSPACE
    trained, code = {
        "flat": (0, 4 * d),
        "sq8": (8 * d, d),
        # Two links to a neighbour on the lowest level; 1 in LINKS vectors is on a higher level, and so on.
        "hnsw": (0, 4 * d + 4 * 2 * LINKS + 4 * LINKS / (LINKS - 1) + 12),
        "ivf-sq8": (4 * d * lists + 8 * d, d + 8),
        "opq-ivf-pq": (4 * rotated * (lists + d + 256), rotated // SUBSPACE + 8),
    }[kind]
    file = trained + round(n * code)
    sample = 4 * d * sample_of(kind, n, d) * {"opq-ivf-pq": 3, "ivf-sq8": 2}.get(kind, 1)  # FAISS copies it
    # Lists and links grow by doubling; what is flat gets its memory at once.
    grown = trained + round({"hnsw": n * (2 * code - 4 * d)}.get(kind, n * code * (GROWTH if kind in IVF else 1)))
    build = max(sample + trained, grown) + 3 * 4 * d * min(n, BLOCK) + (DISTANCES if kind in IVF else 0)
    return Estimate(kind, n, d, file, file + 8 * n, build, n * d * item_bytes(kind))


def choose(kind: str, passages: int, dimension: int, budget: int) -> Estimate:
    """The estimate of the kind asked for; of `auto` the first that the budget has room for, the most exact first.

    Up to MANY passages that are flat and sq8; above, a query that reads all of them takes long. HNSW is never chosen:
    it takes as much memory as flat and by far the longest to build. Raises R3LiteError if nothing fits.
    """
    few = passages < CODEWORDS * LEAST
    if kind == "opq-ivf-pq" and few:
        raise R3LiteError(f"{kind} needs {CODEWORDS * LEAST:,} passages, not {passages:,}", "Pass --index-type auto.")
    by_size = ("flat", "sq8", "ivf-sq8") if few else ("flat", "sq8", *IVF) if passages <= MANY else IVF
    found = [estimate(each, passages, dimension) for each in (by_size if kind == "auto" else (kind,))]
    for each in found:
        if max(each.search, each.build) <= budget:
            return each
    least = found[-1]
    least_mib = -(-max(least.search, least.build) >> 20)
    smaller = "" if kind in ("auto", "opq-ivf-pq") else ", or --index-type auto"
    cause = f"the index does not fit in {_size(budget)}: {least.summary()}"
    raise R3LiteError(cause, f"Pass --memory-budget {least_mib}MiB{smaller}.")


def _size(count: float) -> str:
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MiB"


@dataclass
class Vectors:
    """An index, vectors that were added to it since it was built, and the places of those that were deleted."""

    base: faiss.Index
    added: faiss.IndexFlatIP | None = None
    deleted: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # sorted

    @property
    def places(self) -> int:
        """Number of vectors, the deleted ones among them."""
        return self.base.ntotal + (self.added.ntotal if self.added else 0)

    def search(self, queries: np.ndarray, k: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each of `queries` [Q, d] the scores and numbers of the `k` nearest, nearest first; numbers count what is
        not deleted. Fewer than `k` if the index, or the lists that are read, hold fewer."""
        k = max(1, min(k, self.places - len(self.deleted)))
        bits = np.packbits(self._live(), bitorder="little") if len(self.deleted) else None
        scores, places = self._searched(self.base, queries, k, bits)
        if self.added:
            behind = None if bits is None else np.packbits(self._live()[self.base.ntotal :], bitorder="little")
            more, added = self._searched(self.added, queries, k, behind)
            scores = np.hstack([scores, more])
            places = np.hstack([places, np.where(added < 0, -1, added + self.base.ntotal)])
            order = np.argsort(np.where(places < 0, np.inf, -scores), axis=1, kind="stable")[:, :k]
            scores, places = np.take_along_axis(scores, order, 1), np.take_along_axis(places, order, 1)
        found = [(row[p >= 0], p[p >= 0]) for row, p in zip(scores, places, strict=True)]
        return [(row, p - np.searchsorted(self.deleted, p)) for row, p in found]

    def only(self, fit: np.ndarray) -> "Vectors":
        """Those for which `fit` is true, of the vectors that are not deleted, in their order."""
        live = self._live()
        live[live] = fit
        return replace(self, deleted=np.flatnonzero(~live))

    def _live(self) -> np.ndarray:
        live = np.ones(self.places, dtype=bool)
        live[self.deleted] = False
        return live

    @staticmethod
    def _searched(index: faiss.Index, queries: np.ndarray, k: int, bits: np.ndarray | None):
        """Scores and places [Q, k] of the nearest vectors, padded by place -1. Vectors whose bit is 0 are left out."""
        if bits is None:
            return index.search(queries, k)
        keep = {"sel": faiss.IDSelectorBitmap(bits)}
        given = faiss.SearchParameters(**keep)
        if isinstance(index, faiss.IndexHNSW):
            given = faiss.SearchParametersHNSW(**keep, efSearch=index.hnsw.efSearch)
        elif isinstance(index, (faiss.IndexIVF, faiss.IndexPreTransform)):
            given = faiss.SearchParametersIVF(**keep, nprobe=faiss.extract_index_ivf(index).nprobe)
        if isinstance(index, faiss.IndexPreTransform):
            given = faiss.SearchParametersPreTransform(index_params=given)
        return index.search(queries, k, params=given)


class VectorFile:
    """Vectors that wait on the disk for their index: rows of fp32 or fp16, one after the other, no header."""

    def __init__(self, path: Path, dimension: int, kind: str):
        self.path, self.dimension = path, dimension
        self.type = np.dtype("<f4" if item_bytes(kind) == 4 else "<f2")
        self.row = dimension * self.type.itemsize

    def __len__(self) -> int:
        return self.path.stat().st_size // self.row if self.path.exists() else 0

    def read(self, start: int, count: int) -> np.ndarray:
        """Rows [count, d], fewer at the end, as fp32."""
        rows = np.fromfile(self.path, dtype=self.type, count=count * self.dimension, offset=start * self.row)
        return rows.reshape(-1, self.dimension).astype(np.float32)

    def cut(self, rows: int) -> None:
        """Keeps the first rows only."""
        os.truncate(self.path, rows * self.row)

    def append(self, vectors: np.ndarray) -> None:
        """Adds rows and waits until they are on the disk."""
        with open(self.path, "ab") as file:
            file.write(np.ascontiguousarray(vectors, dtype=self.type).tobytes())
            file.flush()
            os.fsync(file.fileno())

    def sample(self, count: int) -> np.ndarray:
        """`count` rows, the same ones of the same file always, in their order. Only they are in memory."""
        n = len(self)
        chosen = np.sort(np.random.default_rng(0).choice(n, count, replace=False)) if count < n else np.arange(n)
        out = np.empty((len(chosen), self.dimension), dtype=np.float32)
        for start in range(0, n, BLOCK):
            low, high = np.searchsorted(chosen, (start, start + BLOCK))
            if high > low:
                out[low:high] = self.read(start, BLOCK)[chosen[low:high] - start]
        return out


def build_vectors(kind: str, vectors: VectorFile) -> faiss.Index:
    """A new index of a kind: trained on a sample, and filled a block at a time."""
    count, d = len(vectors), vectors.dimension
    index = _empty(kind, count, d)
    if not index.is_trained:
        size = sample_of(kind, count, d)
        print(f"training    {kind} on {size:,} vectors", flush=True)  # which may take minutes, and FAISS tells nothing
        index.train(vectors.sample(size))
    _reserve(index, count)
    bar = tqdm(range(0, count, BLOCK), "indexing", unit="block", **BRIEF)
    add_vectors(index, (vectors.read(start, BLOCK) for start in bar))
    return index


def _empty(kind: str, count: int, d: int) -> faiss.Index:
    lists, parts = lists_of(count, d), d // SUBSPACE
    recipe = {
        "flat": "Flat",
        "sq8": "SQ8",
        "hnsw": f"HNSW{LINKS},Flat",
        "ivf-sq8": f"IVF{lists},SQ8",
        "opq-ivf-pq": f"OPQ{parts}_{parts * SUBSPACE},IVF{lists},PQ{parts}",
    }[kind]
    index = faiss.index_factory(d, recipe, faiss.METRIC_INNER_PRODUCT)
    if kind == "hnsw":
        index.hnsw.efConstruction, index.hnsw.efSearch = CONSTRUCTION, SEARCH
    if kind in ("ivf-sq8", "opq-ivf-pq"):
        ivf = faiss.downcast_index(faiss.extract_index_ivf(index))
        ivf.nprobe = min(lists, max(16, lists // PROBES))
    if kind == "opq-ivf-pq":
        # FAISS's own numbers (50 rounds, 65,536 vectors) would take hours on one core at 768 dimensions.
        rotation = faiss.downcast_VectorTransform(index.chain.at(0))
        rotation.niter, rotation.niter_pq_0 = ROUNDS, 10
        rotation.max_train_points = CODEWORDS * (LEAST + 1)
        ivf.pq.cp.niter, ivf.pq.cp.max_points_per_centroid = 10, LEAST + 1
    return index


def _reserve(index: faiss.Index, count: int) -> None:
    """Takes memory for all vectors at once: an array that doubles holds three times its content at the worst."""
    store = faiss.downcast_index(index.storage) if isinstance(index, faiss.IndexHNSW) else index
    if isinstance(store, (faiss.IndexFlat, faiss.IndexScalarQuantizer)):
        store.codes.resize(count * store.code_size)
        store.codes.resize(0)  # which keeps the memory


def add_vectors(index: faiss.Index, blocks: Iterable[np.ndarray]) -> None:
    """Adds vectors. One thread builds a graph: with several, its links and bytes depend on which is faster."""
    threads = faiss.omp_get_max_threads()
    if isinstance(index, faiss.IndexHNSW):
        faiss.omp_set_num_threads(1)
    try:
        for block in blocks:
            index.add(block)
    finally:
        faiss.omp_set_num_threads(threads)


def blocks_of(index: faiss.Index) -> Iterator[np.ndarray]:
    """The vectors of a flat index, a block at a time."""
    return (index.reconstruct_n(i, min(BLOCK, index.ntotal - i)) for i in range(0, index.ntotal, BLOCK))


def write_vectors(index: faiss.Index, path: Path) -> None:
    """Writes an index and waits until it is on the disk."""
    try:
        faiss.write_index(index, str(path))
    except RuntimeError as error:  # what FAISS makes of a full disk
        reason = str(error).strip().splitlines()[-1]
        raise R3LiteError(f"{path} cannot be written: {reason}", "Free disk space, and run it again.") from error
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def open_vectors(path: Path, kind: str, remedy: str, mapped: bool = True) -> faiss.Index:
    """The index of a file. It is mapped into memory and read as it is needed where FAISS can do so: not on Windows."""
    flags = faiss.IO_FLAG_MMAP_IFC if mapped and os.name != "nt" else 0
    with explained((RuntimeError, MemoryError), f"{path} cannot be read", remedy):
        index = faiss.read_index(str(path), flags)
    if type(index).__name__ != CLASSES[kind] or index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise R3LiteError(f"{path} is a {type(index).__name__}, not an {CLASSES[kind]} with inner products", remedy)
    return index
