"""The vectors of an index, by FAISS: estimates how large each kind becomes, builds an index from a file of vectors,
opens it memory-mapped, and searches it without the deleted vectors.

Owns what each kind is in FAISS and its parameters; knows no passages and no folder's layout. Similarity is the inner
product. Shapes: `Q` queries, `k` results, `d` dimensions.

The kinds, and what they keep of a vector of d dimensions:
flat        the vector, fp32: 4 d bytes; exact, reads all of them for a query
sq8         8 bits a dimension: d bytes; nearly exact, reads all of them for a query
hnsw        the vector and a graph of its neighbours (arXiv 1603.09320): 4 d + 272 bytes; fast, slow to build
ivf-sq8     sq8, each vector in the list of its nearest centroid: d + 8 bytes; a query reads 1 list in 32
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

FULL_SEARCH_LIMIT = 1_000_000  # passages; for more, `auto` chooses an index of which a query reads only a part
LINKS = 32  # links of a vector in the graph of hnsw; on the lowest level there are twice as many
SUBSPACE = 8  # dimensions that are one byte in opq-ivf-pq
SAMPLE_BYTES = 512 << 20  # the size, in fp32, of the largest sample that an index is trained on
CENTROID_VECTORS = 39  # vectors that the sample needs for each centroid; with fewer FAISS warns
BLOCK = 4096  # passages encoded, and vectors added, at a time
GROWTH = 1.5  # memory that growing lists take, divided by that of their content: they grow by doubling
CODEWORDS = 256  # how many values a byte of opq-ivf-pq has; each stands for a centroid of the byte's subspace
DISTANCES = 4 * 4096 * 1024  # bytes of the inner products that FAISS holds at a time while it finds lists
SAMPLE_COPIES = {"ivf-sq8": 2, "opq-ivf-pq": 3}  # how many times FAISS holds the vectors of the sample
IVF = ("ivf-sq8", "opq-ivf-pq")
CLASSES = {
    "flat": "IndexFlatIP",
    "sq8": "IndexScalarQuantizer",
    "hnsw": "IndexHNSWFlat",
    "ivf-sq8": "IndexIVFScalarQuantizer",
    "opq-ivf-pq": "IndexPreTransform",
}
CONSTRUCTION = 80  # candidates of hnsw for a vector's links
SEARCH = 96  # candidates of hnsw for a query
PROBES = 32  # a query reads 1 / PROBES of the lists, but at least MIN_LISTS
MIN_LISTS = 16
ROUNDS = 4  # rounds of OPQ's training; each improves the rotation, then the codewords


def lists_of(passages: int, dimension: int) -> int:
    """Returns the number of lists of an inverted file: the power of two nearest to 4 sqrt(passages), or fewer if the
    sample is too small for so many."""
    wanted = 1 << round(math.log2(4 * math.sqrt(passages)))
    sample = min(passages, SAMPLE_BYTES // (4 * dimension))
    limit = max(1, sample // CENTROID_VECTORS)
    return min(wanted, 1 << (limit.bit_length() - 1))


def sample_of(kind: str, passages: int, dimension: int) -> int:
    """Returns the number of vectors that an index of a kind is trained on: 40 for each list, and at least 64 for each
    of the CODEWORDS; but no more than there are, or than SAMPLE_BYTES hold. Returns 0 if the kind is not trained."""
    if kind not in (*IVF, "sq8"):
        return 0
    wanted = max((CENTROID_VECTORS + 1) * lists_of(passages, dimension), 64 * CODEWORDS)
    return min(passages, wanted, max(1, SAMPLE_BYTES // (4 * dimension)))


def item_bytes(kind: str) -> int:
    """Returns the bytes of a number in a VectorFile: 4 (fp32), or 2 (fp16) if the kind keeps less than fp32 itself."""
    return 4 if kind in ("flat", "hnsw") else 2


@dataclass(frozen=True)
class Estimate:
    """The size of an index, in bytes."""

    kind: str
    passages: int
    dimension: int
    file: int  # the file of the index
    search: int  # memory of searches, once they have read all of the file; with 8 bytes of `ends.bin` a passage
    build: int  # most memory while the index is built, without the encoder
    scratch: int  # disk space of the vectors while the index is built

    def summary(self) -> str:
        to_build = f"{_size(self.build)} to build, without the encoder, and {_size(self.scratch)} of disk meanwhile"
        return f"{self.kind}, {self.passages:,} x {self.dimension}: {_size(self.search)} to search, {to_build}"


def estimate(kind: str, passages: int, dimension: int) -> Estimate:
    """Returns the size of an index of a kind."""
    trained = _trained_bytes(kind, passages, dimension)
    vector_bytes = _code_bytes(kind, dimension)
    content = passages * vector_bytes
    file = trained + round(content)
    # The content takes more memory while it grows: lists and links grow by doubling, a flat index has its size at once.
    if kind == "hnsw":
        links = vector_bytes - 4 * dimension
        grown = passages * (4 * dimension + 2 * links)
    elif kind in IVF:
        grown = content * GROWTH
    else:
        grown = content
    sample = 4 * dimension * sample_of(kind, passages, dimension) * SAMPLE_COPIES.get(kind, 1)
    blocks = 3 * 4 * dimension * min(passages, BLOCK)  # three copies of a block in fp32
    # First the sample is in memory, for the training, then the growing content.
    build = max(sample + trained, trained + round(grown)) + blocks
    if kind in IVF:
        build += DISTANCES
    return Estimate(
        kind=kind,
        passages=passages,
        dimension=dimension,
        file=file,
        search=file + 8 * passages,
        build=build,
        scratch=passages * dimension * item_bytes(kind),
    )


def _trained_bytes(kind: str, passages: int, dimension: int) -> int:
    """Returns the bytes of what training gives an index: centroids, ranges of the dimensions, rotation, codewords."""
    lists = lists_of(passages, dimension)
    ranges = 8 * dimension
    if kind == "sq8":
        return ranges
    if kind == "ivf-sq8":
        return 4 * dimension * lists + ranges
    if kind == "opq-ivf-pq":
        rotated = dimension // SUBSPACE * SUBSPACE
        return 4 * rotated * (lists + dimension + CODEWORDS)  # centroids, rotation, codewords
    return 0


def _code_bytes(kind: str, dimension: int) -> float:
    """Returns the bytes that an index takes for each vector, including its links or its number."""
    if kind == "flat":
        return 4 * dimension
    if kind == "sq8":
        return dimension
    if kind == "hnsw":
        # The vector; 2 LINKS links of 4 bytes on the lowest level; LINKS on each higher level, to which 1 in LINKS
        # vectors of the level below belongs; and 12 bytes for the vector's level and where its links begin.
        return 4 * dimension + 4 * 2 * LINKS + 4 * LINKS / (LINKS - 1) + 12
    if kind == "ivf-sq8":
        return dimension + 8
    return dimension // SUBSPACE + 8


def choose(kind: str, passages: int, dimension: int, budget: int) -> Estimate:
    """Returns the estimate of a kind; for `auto`, that of the most exact kind that fits the budget.

    `auto` chooses flat or sq8 up to FULL_SEARCH_LIMIT passages only: with more, a query that reads all takes long. It
    never chooses HNSW, which takes as much memory as flat and by far the longest to build. Raises R3LiteError if
    nothing fits, or if there are too few passages to train opq-ivf-pq.
    """
    too_few = passages < CODEWORDS * CENTROID_VECTORS
    if kind == "opq-ivf-pq" and too_few:
        cause = f"{kind} needs {CODEWORDS * CENTROID_VECTORS:,} passages, not {passages:,}"
        raise R3LiteError(cause, "Pass --index-type auto.", code="too-few-passages")
    if kind != "auto":
        kinds: tuple[str, ...] = (kind,)
    elif too_few:
        kinds = ("flat", "sq8", "ivf-sq8")
    elif passages <= FULL_SEARCH_LIMIT:
        kinds = ("flat", "sq8", *IVF)
    else:
        kinds = IVF
    estimates = [estimate(candidate, passages, dimension) for candidate in kinds]
    for candidate in estimates:
        if max(candidate.search, candidate.build) <= budget:
            return candidate
    # This need not be the last kind: with few passages, training opq-ivf-pq takes the most memory.
    smallest = min(estimates, key=lambda candidate: max(candidate.search, candidate.build))
    needed_mib = math.ceil(max(smallest.search, smallest.build) / (1 << 20))
    alternative = "" if kind in ("auto", "opq-ivf-pq") else ", or --index-type auto"
    cause = f"the index does not fit in {_size(budget)}: {smallest.summary()}"
    raise R3LiteError(cause, f"Pass --memory-budget {needed_mib}MiB{alternative}.", code="index-beyond-budget")


def _size(count: float) -> str:
    if count >= 1 << 30:
        return f"{count / (1 << 30):.2f} GiB"
    return f"{count / (1 << 20):.1f} MiB"


@dataclass
class Vectors:
    """An index, vectors that were added to it since it was built, and the places of those that were deleted."""

    base: faiss.Index
    added: faiss.IndexFlatIP | None = None
    deleted: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # sorted

    @property
    def places(self) -> int:
        """Returns the number of vectors, including deleted ones."""
        if self.added is None:
            return self.base.ntotal
        return self.base.ntotal + self.added.ntotal

    def search(self, queries: np.ndarray, k: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns for each of `queries` [Q, d] the scores and numbers of the `k` nearest vectors, nearest first.

        A vector's number is its index among those that are not deleted; its place counts the deleted ones, too. There
        are fewer than `k` if the index, or the lists that a query reads, hold fewer.
        """
        k = max(1, min(k, self.places - len(self.deleted)))
        live = self._live() if len(self.deleted) else None
        scores, places = _search(self.base, queries, k=k, live=live)
        if self.added is not None:
            offset = self.base.ntotal
            added_live = None if live is None else live[offset:]
            added_scores, added_places = _search(self.added, queries, k=k, live=added_live)
            scores = np.hstack([scores, added_scores])
            added_places = np.where(added_places < 0, -1, added_places + offset)
            places = np.hstack([places, added_places])
            # The k best of both: sorted by score, padding (place -1) last.
            costs = np.where(places < 0, np.inf, -scores)
            order = np.argsort(costs, axis=1, kind="stable")[:, :k]
            scores = np.take_along_axis(scores, order, 1)
            places = np.take_along_axis(places, order, 1)
        nearest = []
        for query_scores, query_places in zip(scores, places, strict=True):
            is_vector = query_places >= 0
            query_places = query_places[is_vector]
            numbers = query_places - np.searchsorted(self.deleted, query_places)
            nearest.append((query_scores[is_vector], numbers))
        return nearest

    def only(self, mask: np.ndarray) -> "Vectors":
        """Returns the vectors for which `mask` is true. The mask has a value for each vector that is not deleted."""
        live = self._live()
        live[np.flatnonzero(live)] = mask
        return replace(self, deleted=np.flatnonzero(~live))

    def _live(self) -> np.ndarray:
        """Returns bool [places]: False for deleted vectors."""
        live = np.ones(self.places, dtype=bool)
        live[self.deleted] = False
        return live


def _search(
    index: faiss.Index,
    queries: np.ndarray,
    k: int,
    live: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns scores and places [Q, k] of the nearest vectors, padded by place -1.

    `live` [places] is False for vectors that are left out; None: none is.
    """
    if live is None:
        return index.search(queries, k)
    bits = np.packbits(live, bitorder="little")
    selector = faiss.IDSelectorBitmap(bits)
    if isinstance(index, faiss.IndexHNSW):
        parameters = faiss.SearchParametersHNSW(sel=selector, efSearch=index.hnsw.efSearch)
    elif isinstance(index, (faiss.IndexIVF, faiss.IndexPreTransform)):
        parameters = faiss.SearchParametersIVF(sel=selector, nprobe=faiss.extract_index_ivf(index).nprobe)
    else:
        parameters = faiss.SearchParameters(sel=selector)
    if isinstance(index, faiss.IndexPreTransform):
        parameters = faiss.SearchParametersPreTransform(index_params=parameters)
    return index.search(queries, k, params=parameters)


class VectorFile:
    """Vectors that wait on the disk for their index: rows of fp32 or fp16, one after the other, no header."""

    def __init__(self, path: Path, dimension: int, kind: str):
        self.path = path
        self.dimension = dimension
        self.type = np.dtype("<f4" if item_bytes(kind) == 4 else "<f2")
        self.row_bytes = dimension * self.type.itemsize

    def __len__(self) -> int:
        if not self.path.exists():
            return 0
        return self.path.stat().st_size // self.row_bytes

    def read(self, start: int, count: int) -> np.ndarray:
        """Returns rows [count, d] from `start` on, fewer at the end, as fp32."""
        rows = np.fromfile(
            self.path,
            dtype=self.type,
            count=count * self.dimension,
            offset=start * self.row_bytes,
        )
        return rows.reshape(-1, self.dimension).astype(np.float32)

    def cut(self, rows: int) -> None:
        """Cuts the file off after the first `rows` rows."""
        os.truncate(self.path, rows * self.row_bytes)

    def append(self, vectors: np.ndarray) -> None:
        """Adds rows and waits until they are on the disk."""
        with open(self.path, "ab") as file:
            file.write(np.ascontiguousarray(vectors, dtype=self.type).tobytes())
            file.flush()
            os.fsync(file.fileno())

    def sample(self, count: int) -> np.ndarray:
        """Returns `count` rows, drawn with a fixed seed, in their order. The other rows are not kept in memory."""
        n = len(self)
        if count < n:
            generator = np.random.default_rng(0)
            rows = np.sort(generator.choice(n, count, replace=False))
        else:
            rows = np.arange(n)
        sample = np.empty((len(rows), self.dimension), dtype=np.float32)
        for start in range(0, n, BLOCK):
            low, high = np.searchsorted(rows, (start, start + BLOCK))
            if high > low:
                block = self.read(start, BLOCK)
                sample[low:high] = block[rows[low:high] - start]
        return sample


def build_vectors(kind: str, vectors: VectorFile) -> faiss.Index:
    """Returns a new index of a kind: trained on a sample, and filled a block at a time."""
    count = len(vectors)
    index = _empty(kind, count, vectors.dimension)
    if not index.is_trained:
        size = sample_of(kind, count, vectors.dimension)
        print(f"training    {kind} on {size:,} vectors", flush=True)  # it may take minutes; FAISS prints nothing
        index.train(vectors.sample(size))
    _reserve(index, count)
    bar = tqdm(range(0, count, BLOCK), "indexing", unit="block", **BRIEF)
    add_vectors(index, (vectors.read(start, BLOCK) for start in bar))
    return index


def _empty(kind: str, count: int, d: int) -> faiss.Index:
    """Returns an index of a kind for `count` vectors of d dimensions. It has none yet, and is not trained."""
    lists = lists_of(count, d)
    parts = d // SUBSPACE
    recipe = {
        "flat": "Flat",
        "sq8": "SQ8",
        "hnsw": f"HNSW{LINKS},Flat",
        "ivf-sq8": f"IVF{lists},SQ8",
        "opq-ivf-pq": f"OPQ{parts}_{parts * SUBSPACE},IVF{lists},PQ{parts}",
    }[kind]
    index = faiss.index_factory(d, recipe, faiss.METRIC_INNER_PRODUCT)
    if kind == "hnsw":
        index.hnsw.efConstruction = CONSTRUCTION
        index.hnsw.efSearch = SEARCH
    if kind in ("ivf-sq8", "opq-ivf-pq"):
        ivf = faiss.downcast_index(faiss.extract_index_ivf(index))
        ivf.nprobe = min(lists, max(MIN_LISTS, lists // PROBES))
    if kind == "opq-ivf-pq":
        # FAISS's own numbers (50 rounds, 65,536 vectors) would take hours on one core at 768 dimensions.
        rotation = faiss.downcast_VectorTransform(index.chain.at(0))
        rotation.niter = ROUNDS
        rotation.niter_pq_0 = 10
        rotation.max_train_points = CODEWORDS * (CENTROID_VECTORS + 1)
        ivf.pq.cp.niter = 10
        ivf.pq.cp.max_points_per_centroid = CENTROID_VECTORS + 1
    return index


def _reserve(index: faiss.Index, count: int) -> None:
    """Reserves memory for all vectors, unless the index keeps them in lists.

    An array that grows by doubling holds three times its content at worst.
    """
    store = faiss.downcast_index(index.storage) if isinstance(index, faiss.IndexHNSW) else index
    if isinstance(store, (faiss.IndexFlat, faiss.IndexScalarQuantizer)):
        store.codes.resize(count * store.code_size)
        store.codes.resize(0)  # which keeps the memory


def add_vectors(index: faiss.Index, blocks: Iterable[np.ndarray]) -> None:
    """Adds vectors. A graph is built by one thread: with several, its links would depend on which of them is faster."""
    threads = faiss.omp_get_max_threads()
    if isinstance(index, faiss.IndexHNSW):
        faiss.omp_set_num_threads(1)
    try:
        for block in blocks:
            index.add(block)
    finally:
        faiss.omp_set_num_threads(threads)


def blocks_of(index: faiss.Index) -> Iterator[np.ndarray]:
    """Yields the vectors of a flat index, a block at a time."""
    for start in range(0, index.ntotal, BLOCK):
        yield index.reconstruct_n(start, min(BLOCK, index.ntotal - start))


def write_vectors(index: faiss.Index, path: Path) -> None:
    """Writes an index and waits until it is on the disk."""
    try:
        faiss.write_index(index, str(path))
    except RuntimeError as error:  # raised by FAISS if the disk is full
        reason = str(error).strip().splitlines()[-1]
        raise R3LiteError(
            f"{path} cannot be written: {reason}", "Free disk space, and run it again.", code="index-unwritable"
        ) from error
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def open_vectors(path: Path, kind: str, remedy: str, mapped: bool = True) -> faiss.Index:
    """Returns the index of a file.

    With `mapped`, the file is mapped into memory and read as it is needed, except on Windows, where FAISS cannot do so.
    Raises R3LiteError if the file cannot be read, or holds an index of another kind.
    """
    flags = faiss.IO_FLAG_MMAP_IFC if mapped and os.name != "nt" else 0
    with explained((RuntimeError, MemoryError), f"{path} cannot be read", remedy, code="index-unreadable"):
        index = faiss.read_index(str(path), flags)
    if type(index).__name__ != CLASSES[kind] or index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise R3LiteError(
            f"{path} is a {type(index).__name__}, not an {CLASSES[kind]} with inner products",
            remedy,
            code="index-kind-differs",
        )
    return index
