#!/usr/bin/env bash
# voyager 2.2.3, Python 3.11: with inner products, get_distance ranks otherwise than query, and its calls change it
#
# Valid input: an index with Space.InnerProduct and vectors of different lengths, as models trained for inner products
# give them; get_distance, "the distance between two provided vectors", for a question and each of four passages.
#
# Expected: the distance that query gives, which is 1 - the inner product. With Space.Euclidean and Space.Cosine both
# are the same.
#
# Seen: query is right. get_distance subtracts the product of two roots, one for each vector: of the greatest squared
# length that the index has seen, less the squared length of the vector. So short vectors seem near: the best passage
# comes after two others, and level with the one that points away from the question. And get_distance counts what it
# is given as seen: after a call with one long vector, which is not in the index, all later calls give other numbers.
#
# Why it matters: get_distance is there to rerank candidates, to find near duplicates among passages, or to see how far
# a passage is that query did not find. It is right for an index whose vectors all have one length if those compared
# have it too, so a test with normalised vectors passes. query, or the product of two results of get_vector, is safe.
#
# Output:
#   1 - inner product                         -2.00     0.00     0.50     2.00
#   query                                     -2.00     0.00     0.50     2.00
#   get_distance                              -2.00    -4.00    -3.50    -2.00
#   query after a get_distance of others      -2.00     0.00     0.50     2.00
#   get_distance after the same             -363.00  -361.00  -360.50  -359.00
#   Space.Euclidean: query                     4.00     4.00     0.26     5.00
#   Space.Euclidean: get_distance              4.00     4.00     0.26     5.00
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet voyager==2.2.3 numpy==2.4.6 || exit 2
"$work/venv/bin/python" - <<'PY'
import numpy as np
from voyager import Index, Space

QUESTION = np.array([1, 0], dtype="float32")
PASSAGES = np.array([[3, 0], [1, 2], [0.5, 0.1], [-1, 1]], dtype="float32")
LONG = np.array([20, 0], dtype="float32")


def index_of(space: Space, vectors: np.ndarray) -> Index:
    index = Index(space, num_dimensions=2)
    for number, vector in enumerate(vectors):
        index.add_item(vector, number)
    return index


def both(index: Index) -> tuple[list[float], list[float]]:
    """For each of the passages, the distances to the question that query and get_distance give."""
    numbers, distances = index.query(QUESTION, k=len(index))
    by_query = dict(zip(numbers.tolist(), distances.tolist(), strict=True))
    found = [by_query[number] for number in range(len(PASSAGES))]
    return found, [index.get_distance(QUESTION, passage) for passage in PASSAGES]


def row(label: str, values: list[float]) -> None:
    print(f"{label:38}" + "".join(f"{value + 0.0:9.2f}" for value in values))


index = index_of(Space.InnerProduct, PASSAGES)
right = (1 - PASSAGES @ QUESTION).tolist()
query, distance = both(index)
row("1 - inner product", right)
row("query", query)
row("get_distance", distance)
index.get_distance(LONG, LONG)
query_after, distance_after = both(index)
row("query after a get_distance of others", query_after)
row("get_distance after the same", distance_after)
euclidean = both(index_of(Space.Euclidean, PASSAGES))
row("Space.Euclidean: query", euclidean[0])
row("Space.Euclidean: get_distance", euclidean[1])

assert np.allclose(query, right)
assert np.allclose(query_after, right)
assert np.argmin(query) == 0
assert np.argmin(distance) == 1
assert np.isclose(distance[3], distance[0])
assert max(distance_after) < -300
for space in (Space.Euclidean, Space.Cosine):
    assert np.allclose(*both(index_of(space, PASSAGES)), atol=1e-5)
PY
