#!/usr/bin/env bash
# vicinity 0.4.6, Python 3.11: the metric "dot" is the cosine, and the distances of "ip" end at 0
#
# Valid input: vectors of unequal lengths, as encoders trained for the dot product give (those of TAS-B, or of
# multi-qa-mpnet-base-dot-v1); the metrics that the README lists: `dot`, `euclidean` and `cosine` for ANNOY, `cos` and
# `ip` for USEARCH; and a query that is one of the vectors.
#
# Expected: with "dot" the ranking of the inner products, for the README lists it beside "cosine". With "ip" the
# distances of usearch, 1 minus the inner product, for what Vicinity adds is "a unified interface for all backends".
#
# Seen: "dot" is an alias of "cosine": the vectors lose their lengths, and the ranking is that of the cosine, with ANNOY
# and with the exact BASIC too. With "ip" the ranking is right, but query sets every distance below 0 to 0. So all
# vectors with an inner product above 1 have the same distance, and these are the best ones. query_threshold compares
# first and sets to 0 then: asked for distances below -20, it gives fewer items, all with the distance 0.
#
# Why it matters: "dot" has no error and most of the neighbours, so it looks like a weak encoder. With "ip" the order is
# there, but not the scores: what is merged from several indexes, fused with BM25 by score, or cut off by a margin to
# the second one, is decided by ties.
#
# Output:
#   ANNOY   "dot"      5 of the 10 largest inner products; same items as "cosine": True
#   BASIC   "dot"      5 of the 10 largest inner products; same items as "cosine": True
#   USEARCH "ip"      10 of the 10 largest inner products
#     inner products    55.9  39.9  30.1  28.1  26.1  26.0  25.5  24.5  24.2  22.8
#     query              0.0   0.0   0.0   0.0   0.0   0.0   0.0   0.0   0.0   0.0
#     usearch itself   -54.9 -38.9 -29.1 -27.1 -25.1 -25.0 -24.5 -23.5 -23.2 -21.8
#     query_threshold   -20: 14 items, distances {0.0}
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet vicinity==0.4.6 annoy==1.17.3 usearch==2.26.6 numpy==2.4.6 || exit 2
"$work/venv/bin/python" - <<'PY'
import numpy as np
from usearch.index import Index
from vicinity import Vicinity

random = np.random.default_rng(0)
vectors = random.normal(size=(500, 32)) * random.uniform(0.5, 2, size=(500, 1))
vectors = vectors.astype(np.float32)
query = vectors[7]
products = vectors @ query
largest = np.argsort(-products)[:10]


def nearest(backend: str, metric: str) -> tuple[list[int], list[float]]:
    """The numbers of the ten nearest vectors, and their distances."""
    store = Vicinity.from_vectors_and_items(vectors, range(len(vectors)), backend_type=backend, metric=metric)
    found = store.query(query, k=10)[0]
    return [item for item, _ in found], [float(distance) for _, distance in found]


def line(label: str, numbers) -> None:
    print(f"  {label:16} " + " ".join(f"{number:5.1f}" for number in numbers))


right = {}
for backend in ("annoy", "basic"):
    items, _ = nearest(backend, "dot")
    same = items == nearest(backend, "cosine")[0]
    right[backend] = len(set(items) & set(largest))
    among = f"{right[backend]:5} of the 10 largest inner products"
    print(f'{backend.upper():7} "dot"  {among}; same items as "cosine": {same}')
    assert same
    assert right[backend] < 10

items, distances = nearest("usearch", "ip")
right["usearch"] = len(set(items) & set(largest))
print(f'USEARCH "ip"   {right["usearch"]:5} of the 10 largest inner products')
index = Index(ndim=32, metric="ip", dtype="f32")
index.add(np.arange(len(vectors)), vectors)
itself = index.search(query, 10)
store = Vicinity.from_vectors_and_items(vectors, range(len(vectors)), backend_type="usearch", metric="ip")
within = store.query_threshold(query, threshold=-20)[0]
line("inner products", products[items])
line("query", distances)
line("usearch itself", itself.distances)
print(f"  query_threshold   -20: {len(within)} items, distances {({float(distance) for _, distance in within})}")
assert right["usearch"] == 10
assert set(distances) == {0.0}
assert np.allclose(itself.distances, 1 - products[largest], atol=0.01)
assert len(within) == (1 - products < -20).sum() > 0
assert {float(distance) for _, distance in within} == {0.0}
PY
