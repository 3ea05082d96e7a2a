#!/usr/bin/env bash
# faiss-cpu 1.15.1, Python 3.11: equal vectors make other vectors of an HNSW index unfindable
#
# Valid input: vectors of which some are equal, as those of passages with the same text are (empty passages, titles
# alone, boilerplate). Each of the different vectors is searched with itself as the query, so its distance is 0.
#
# Expected: equal vectors cost some time, and places in the results near them. All others are found as before.
#
# Seen: the links of equal vectors go to one another, and others lose the links that led to them. With 1,000 equal
# vectors among 11,000, a tenth of the different ones (200 are tried) is not found any more, also with a beam as large
# as the index: no path leads to them. With 1,000 equal ones first and 500 others nearly none is found. There is no
# error and no empty place in the results: other vectors take the place.
#
# Why it matters: the recall measured on a clean sample says nothing about a crawled corpus. Passages should be
# deduplicated before they go into an HNSW index, or the index compared with a flat one on the corpus itself.
#
# Output (shares found with efSearch 64 and with efSearch = size of the index):
#   10,000 different:                   1.000 1.000
#   10,000 different, then 1,000 equal: 0.895 0.905
#   1,000 equal, then 500 different:    0.000 0.052
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet faiss-cpu==1.15.1 numpy==2.4.6 || exit 2
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'PY'
import faiss
import numpy as np

DIMENSIONS = 16


def found(vectors: np.ndarray, rows: np.ndarray) -> tuple[float, float]:
    """The shares of the rows that a search finds with themselves as the query, with a usual beam and the largest."""
    index = faiss.IndexHNSWFlat(DIMENSIONS, 32)
    index.add(vectors)
    shares = []
    for beam in (64, len(vectors)):
        index.hnsw.efSearch = beam
        _, ids = index.search(vectors[rows], 1)
        shares.append(float((ids[:, 0] == rows).mean()))
    return shares[0], shares[1]


generator = np.random.default_rng(1)
different = generator.normal(size=(10_000, DIMENSIONS)).astype("float32")
equal = np.repeat(generator.normal(size=(1, DIMENSIONS)).astype("float32"), 1_000, axis=0)
few = different[:500]

clean = found(different, np.arange(200))
some = found(np.vstack([different, equal]), np.arange(200))
many = found(np.vstack([equal, few]), np.arange(1_000, 1_500))
print(f"10,000 different:                   {clean[0]:.3f} {clean[1]:.3f}")
print(f"10,000 different, then 1,000 equal: {some[0]:.3f} {some[1]:.3f}")
print(f"1,000 equal, then 500 different:    {many[0]:.3f} {many[1]:.3f}")

assert min(clean) > 0.99
assert max(some) < 0.97
assert max(many) < 0.5
PY
