"""How large an index of each kind becomes, and which kind a corpus gets: arithmetic, without FAISS.

The kinds, and what they keep of a vector of d dimensions:
flat        the vector, fp32: 4 d bytes; exact, reads all of them for a query
sq8         8 bits a dimension: d bytes; nearly exact, reads all of them for a query
hnsw        the vector and a graph of its neighbours (arXiv 1603.09320): 4 d + 272 bytes; fast, slow to build
ivf-sq8     sq8 in lists by the nearest of many centroids: d + 8 bytes; a query reads 1 list of 32
opq-ivf-pq  the same lists, a byte for each 8 dimensions of the rotated vector (OPQ, CVPR 2013): d / 8 + 8 bytes
"""

import math
from dataclasses import dataclass

from r3lite.core.errors import R3LiteError

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
        to_build = f"{_size(self.build)} to build beside the encoder, {_size(self.scratch)} of disk meanwhile"
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
    copies = {"opq-ivf-pq": 3, "ivf-sq8": 2}.get(kind, 1)  # that FAISS makes of the sample
    sample = 4 * d * sample_of(kind, n, d) * copies
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
    kinds = by_size if kind == "auto" else (kind,)
    found = [estimate(each, passages, dimension) for each in kinds]
    for each in found:
        if max(each.search, each.build) <= budget:
            return each
    least = found[-1]
    least_mib = -(-max(least.search, least.build) >> 20)
    smaller = "" if kind in ("auto", "opq-ivf-pq") else ", or --index-type auto"
    cause = f"an index {least.summary()}: more than the budget of {_size(budget)}"
    raise R3LiteError(cause, f"Pass --memory-budget {least_mib}MiB{smaller}.")


def _size(count: float) -> str:
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MiB"
