"""Indexes of N vectors, each kind: bytes, recall@10, queries a second, time and memory of building.

    python -m bench.retrieval --vectors 100000
    python -m bench.retrieval --page     # writes the page again from what was measured

The vectors are synthetic: a cluster for every 100 of them; a vector is its cluster's centre plus noise as long as it,
both with variances that fall as 1 / rank over the dimensions, as those of sentence encoders do, scaled to length 1.
A query is drawn as another vector of a cluster. Each kind is measured in a process of its own on one thread; queries
come one at a time and the index is mapped into memory, all of it read before.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

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
CLUSTER, QUERIES, K = 100, 500, 10
WIKIPEDIA = 21_015_324  # passages of the dump of December 2018 in 100 words each
MIB = 1 << 20


def draw(rng: np.random.Generator, centres: np.ndarray, count: int) -> np.ndarray:
    """Vectors [count, d] of clusters drawn at random."""
    d = centres.shape[1]
    noise = rng.standard_normal((count, d), dtype=np.float32) * spread(d)
    made = centres[rng.integers(len(centres), size=count)] + noise
    return made / np.linalg.norm(made, axis=1, keepdims=True)


def spread(d: int) -> np.ndarray:
    return (1 / np.sqrt(np.arange(1, d + 1))).astype(np.float32)


def prepare(folder: Path, count: int, d: int) -> None:
    """Writes the vectors in fp32 and fp16, queries, and the true nearest of each, by brute force."""
    rng = np.random.default_rng(d)
    centres = rng.standard_normal((max(1, count // CLUSTER), d), dtype=np.float32) * spread(d)
    queries = draw(rng, centres, QUERIES)
    scores, places = np.empty((QUERIES, 0), np.float32), np.empty((QUERIES, 0), np.int64)
    for start in range(0, count, BLOCK):
        block = draw(rng, centres, min(BLOCK, count - start))
        for kind in ("flat", "sq8"):
            VectorFile(folder / kind, d, kind).append(block)
        scores = np.hstack([scores, queries @ block.T])
        places = np.hstack([places, np.broadcast_to(np.arange(start, start + len(block)), (QUERIES, len(block)))])
        best = np.argpartition(-scores, K - 1, axis=1)[:, :K]
        scores, places = np.take_along_axis(scores, best, 1), np.take_along_axis(places, best, 1)
    np.save(folder / "queries.npy", queries)
    np.save(folder / "nearest.npy", places)


def peak() -> float:
    """MiB that this process has had in memory at the most (Linux)."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def build(folder: Path, kind: str, count: int, d: int, answer) -> None:
    before, began = peak(), time.process_time()
    index = build_vectors(kind, VectorFile(folder / ("flat" if kind in ("flat", "hnsw") else "sq8"), d, kind))
    seconds = time.process_time() - began
    write_vectors(index, folder / "index")
    answer.put({"build_s": seconds, "build_peak_mib": peak() - before})


def search(folder: Path, kind: str, count: int, d: int, answer) -> None:
    queries, nearest = np.load(folder / "queries.npy"), np.load(folder / "nearest.npy")
    (folder / "index").read_bytes()  # from now on in the cache of the system
    vectors = Vectors(open_vectors(folder / "index", kind, ""))
    vectors.search(queries[:1], K)
    began = time.process_time()
    found = [vectors.search(query[None], K)[0][1] for query in queries]
    seconds = time.process_time() - began
    hits = sum(len(np.intersect1d(mine, true)) for mine, true in zip(found, nearest, strict=True))
    answer.put({"recall_at_10": hits / nearest.size, "queries_per_s": QUERIES / seconds})


def apart(work, *arguments) -> dict:
    """What `work` answers in a new process."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=work, args=(*arguments, answer))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{work.__name__} of {arguments[1]} ended with {process.exitcode}")
    return answer.get()


def measure(count: int, dimensions: list[int], place: str | None) -> None:
    for d in dimensions:
        with tempfile.TemporaryDirectory(dir=place) as name:
            folder = Path(name)
            prepare(folder, count, d)
            for kind in CLASSES:
                row = {"kind": kind, "vectors": count, "dimension": d}
                row |= apart(build, folder, kind, count, d) | {"bytes": (folder / "index").stat().st_size}
                row |= apart(search, folder, kind, count, d)
                row |= {"date": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()), "commit": commit(ROOT)}
                row |= {"processor": processor("cpu"), "threads": int(os.environ.get("OMP_NUM_THREADS", 0))}
                print(json.dumps(row), flush=True)
                write_json(RESULTS, {"runs": [*read(RESULTS), row]})


def page() -> str:
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
    for r in runs:
        told = estimate(r["kind"], r["vectors"], r["dimension"])
        lines.append(
            f"| {r['vectors']:,} | {r['dimension']} | {r['kind']} | {r['bytes'] / MIB:,.1f} "
            f"({told.file / MIB:,.1f}) | {r['recall_at_10']:.3f} | {r['queries_per_s']:,.0f} | "
            f"{r['build_s']:,.1f} s | {r['build_peak_mib']:,.0f} ({told.build / MIB:,.0f}) |"
        )
    lines += ["", f"`auto` for {WIKIPEDIA:,} passages, predicted:", ""]
    lines += ["| budget | 384 dimensions | 768 dimensions |", "|---|---|---|"]
    for gib in (4, 8, 16):
        lines.append(f"| {gib} GiB | {' | '.join(predicted(d, gib << 30) for d in (384, 768))} |")
    used = sorted({f"{r['processor']}, {r['threads']} thread, commit {r['commit'][:7]}" for r in runs})
    return "\n".join([*lines, "", f"Measured on {'; '.join(used)}.", ""])


def predicted(d: int, budget: int) -> str:
    try:
        return choose("auto", WIKIPEDIA, d, budget).summary()
    except R3LiteError as error:
        return error.cause


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vectors", type=int, default=100_000)
    parser.add_argument("--dimensions", type=int, nargs="+", default=[384, 768])
    parser.add_argument(
        "--place", help="folder for the vectors, by default the system's: 6 bytes a number and the index"
    )
    parser.add_argument("--page", action="store_true", help="only write the page")
    given = parser.parse_args()
    if not given.page:
        measure(given.vectors, given.dimensions, given.place)
    write_text(RESULTS.with_suffix(".md"), page())


if __name__ == "__main__":
    main()
