"""Measures each kind of index on N vectors: bytes, recall@10, queries a second, time and memory of building.

    python -m bench.retrieval --vectors 100000
    python -m bench.retrieval --page     # only writes the page again, from the results

The vectors are synthetic. There is a cluster for every 100 vectors. A vector is the sum of its cluster's centre and of
noise, scaled to length 1. Centres and noise have the same variances: 1 / i in dimension i (from 1), which fall as those
of sentence encoders do. Queries are drawn like vectors. Building and searching an
index each run in a new process; set OMP_NUM_THREADS=1 to measure one thread. The index is mapped into memory, and its
file is read once before the searches, so that it is in the system's cache. Queries come one at a time.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np

from bench.records import ROOT, commit, processor, read
from r3lite.core.errors import R3LiteError
from r3lite.core.files import write_json, write_text
from r3lite.retrieval.vectors import (
    BLOCK,
    CLASSES,
    VectorFile,
    Vectors,
    build_vectors,
    choose,
    estimate,
    open_vectors,
    write_vectors,
)

RESULTS = ROOT / "bench" / "results" / "retrieval.json"
CLUSTER_SIZE = 100  # vectors
QUERIES = 500
K = 10  # nearest vectors that a query searches for
# The vectors are in a file in fp32, named after the index "flat", and in one in fp16, named after "sq8".
FILE_KINDS = ("flat", "sq8")
FLAT_FILE_INDEXES = ("flat", "hnsw")  # kinds of index that are built from the vectors in fp32
WIKIPEDIA = 21_015_324  # passages of 100 words in the dump of December 2018
MIB = 1 << 20
GIB_SHIFT = 30  # x GiB are x << 30 bytes
KIB_PER_MIB = 1024
PAGE_BUDGETS = (4, 8, 16)  # GiB
PAGE_DIMENSIONS = (384, 768)
SHORT_HASH = 7  # characters of a commit


def draw(rng: np.random.Generator, centres: np.ndarray, count: int) -> np.ndarray:
    """Returns vectors [count, d] of length 1, each of a random cluster. `centres` [clusters, d] are the centres."""
    d = centres.shape[1]
    noise = rng.standard_normal((count, d), dtype=np.float32) * standard_deviations(d)
    vectors = centres[rng.integers(len(centres), size=count)] + noise
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def standard_deviations(d: int) -> np.ndarray:
    """Returns the standard deviation of each of d dimensions: the variance of dimension i, from 1, is 1 / i."""
    return (1 / np.sqrt(np.arange(1, d + 1))).astype(np.float32)


def prepare(folder: Path, count: int, d: int) -> None:
    """Writes `count` vectors of dimension d in fp32 and fp16, the queries, and the indices of each query's K nearest.

    The nearest vectors are found by brute force. They are updated after each block of vectors, so that the scores of
    all vectors are never in memory together.
    """
    rng = np.random.default_rng(d)
    centres = rng.standard_normal((max(1, count // CLUSTER_SIZE), d), dtype=np.float32) * standard_deviations(d)
    queries = draw(rng, centres, QUERIES)
    scores = np.empty((QUERIES, 0), np.float32)  # of the best vectors of each query so far
    indices = np.empty((QUERIES, 0), np.int64)  # of the same vectors
    for start in range(0, count, BLOCK):
        block = draw(rng, centres, min(BLOCK, count - start))
        for kind in FILE_KINDS:
            VectorFile(folder / kind, d, kind).append(block)
        scores = np.hstack([scores, queries @ block.T])
        block_indices = np.broadcast_to(np.arange(start, start + len(block)), (QUERIES, len(block)))
        indices = np.hstack([indices, block_indices])
        best = np.argpartition(-scores, K - 1, axis=1)[:, :K]
        scores = np.take_along_axis(scores, best, 1)
        indices = np.take_along_axis(indices, best, 1)
    np.save(folder / "queries.npy", queries)
    np.save(folder / "nearest.npy", indices)


def peak_mib() -> float:
    """Returns the largest resident memory that this process has had so far, in MiB (Linux only)."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) / KIB_PER_MIB


def build(folder: Path, kind: str, d: int, results: multiprocessing.Queue) -> None:
    """Builds an index of the vectors in the folder and writes it there. Puts a dictionary into the queue.

    The dictionary has the CPU seconds, and by how many MiB building raised the peak memory of this process.
    """
    peak_before = peak_mib()
    start = time.process_time()
    index = build_vectors(kind, VectorFile(folder / ("flat" if kind in FLAT_FILE_INDEXES else "sq8"), d, kind))
    seconds = time.process_time() - start
    write_vectors(index, folder / "index")
    results.put({"build_s": seconds, "build_peak_mib": peak_mib() - peak_before})


def search(folder: Path, kind: str, results: multiprocessing.Queue) -> None:
    """Searches the index for each query. Puts a dictionary with recall@10 and queries per CPU second into the queue."""
    queries = np.load(folder / "queries.npy")
    nearest = np.load(folder / "nearest.npy")
    (folder / "index").read_bytes()  # puts the file into the system's cache
    vectors = Vectors(open_vectors(folder / "index", kind, ""))
    vectors.search(queries[:1], K)  # warms up
    start = time.process_time()
    results_of_queries = [vectors.search(query[None], K)[0][1] for query in queries]  # indices of vectors
    seconds = time.process_time() - start
    hits = sum(len(np.intersect1d(indices, true)) for indices, true in zip(results_of_queries, nearest, strict=True))
    results.put({"recall_at_10": hits / nearest.size, "queries_per_s": QUERIES / seconds})


def in_new_process(work: Callable, *arguments) -> dict:
    """Runs `work(*arguments, queue)` in a new process, and returns what it puts into the queue.

    The second argument has to be the kind of index, for the error message.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=work, args=(*arguments, results))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{work.__name__} of {arguments[1]} ended with {process.exitcode}")
    return results.get()


def measure(count: int, dimensions: list[int], parent_folder: str | None) -> None:
    """Measures all kinds of index with `count` vectors of each dimension, and adds the results to the file.

    The vectors are in a temporary folder inside `parent_folder`; None: inside the system's folder for such files.
    """
    for d in dimensions:
        with tempfile.TemporaryDirectory(dir=parent_folder) as temporary_folder:
            folder = Path(temporary_folder)
            prepare(folder, count, d)
            for kind in CLASSES:
                row = {"kind": kind, "vectors": count, "dimension": d}
                row |= in_new_process(build, folder, kind, d) | {"bytes": (folder / "index").stat().st_size}
                row |= in_new_process(search, folder, kind)
                row |= {"date": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()), "commit": commit(ROOT)}
                row |= {"processor": processor("cpu"), "threads": faiss.omp_get_max_threads()}
                print(json.dumps(row), flush=True)
                write_json(RESULTS, {"runs": [*read(RESULTS), row]})


def page() -> str:
    """Returns the page in Markdown: what was measured, with predictions, and what `auto` would choose for Wikipedia."""
    lines = [
        "# Indexes by kind",
        "",
        "By `python -m bench.retrieval --vectors N`, which says what the vectors are.",
        "",
    ]
    lines += [
        "Processor time; memory above what the process had before; predicted in brackets.",
        "",
    ]
    lines += ["| vectors | dimensions | kind | MiB | recall@10 | queries/s | built in | peak MiB of building |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    runs = read(RESULTS)
    for run in runs:
        predicted = estimate(run["kind"], run["vectors"], run["dimension"])
        lines.append(
            f"| {run['vectors']:,} | {run['dimension']} | {run['kind']} | {run['bytes'] / MIB:,.1f} "
            f"({predicted.file / MIB:,.1f}) | {run['recall_at_10']:.3f} | {run['queries_per_s']:,.0f} | "
            f"{run['build_s']:,.1f} s | {run['build_peak_mib']:,.0f} ({predicted.build / MIB:,.0f}) |"
        )
    lines += ["", f"`auto` for {WIKIPEDIA:,} passages, predicted:", ""]
    lines += ["| budget | 384 dimensions | 768 dimensions |", "|---|---|---|"]
    for gib in PAGE_BUDGETS:
        lines.append(f"| {gib} GiB | {' | '.join(automatic_choice(d, gib << GIB_SHIFT) for d in PAGE_DIMENSIONS)} |")
    machines = set()
    for run in runs:
        machines.add(f"{run['processor']}, {run['threads']} thread, commit {run['commit'][:SHORT_HASH]}")
    return "\n".join([*lines, "", f"Measured on {'; '.join(sorted(machines))}.", ""])


def automatic_choice(d: int, budget: int) -> str:
    """Returns a description of the index that `auto` chooses for Wikipedia within a budget in bytes, or the error."""
    try:
        return choose(kind="auto", passages=WIKIPEDIA, dimension=d, budget=budget).summary()
    except R3LiteError as error:
        return error.cause


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vectors", type=int, default=100_000)
    parser.add_argument("--dimensions", type=int, nargs="+", default=[384, 768])
    parser.add_argument(
        "--place", help="folder for temporary files [the system's]: 6 bytes for each number of a vector, and an index"
    )
    parser.add_argument("--page", action="store_true", help="only write the page")
    flags = parser.parse_args()
    if not flags.page:
        measure(flags.vectors, flags.dimensions, flags.place)
    write_text(RESULTS.with_suffix(".md"), page())


if __name__ == "__main__":
    main()
