#!/usr/bin/env bash
# usearch 2.26.6, Python 3.11: with dtype="i8" an index of inner products or of Euclidean distances searches by cosine
#
# Valid input: Index(metric="ip", dtype="i8"), as the Python documentation names both values, and vectors of different
# lengths, as models trained for inner products give them. The search is exact, so that no graph can miss a neighbour.
#
# Expected: nearly the neighbours of 32-bit vectors, less what eight bits lose. The eight-bit floats of the same
# library, e5m2 and e4m3, find 47 of 50.
#
# Seen: the nearest vector is the right one for 11 of 50 questions (inner products) and for 8 of 50 (Euclidean), and the
# one of the largest cosine for 49 of 50. Vectors are brought to length 1 and then to the integers from -127 to 127,
# whatever the metric, so get() of a vector and of ten times this vector give the same, too.
#
# Why it matters: nothing is raised, distances look like distances, and on vectors of length 1, which most tests use,
# all is right. With other vectors the length, which here decides, is lost. Normalise what may be normalised and use
# "cos"; for everything else take "f16", "bf16" or "e5m2".
#
# Output:
#   ip     f32    right 50   largest cosine 11   of 50
#   ip     e5m2   right 47   largest cosine 11   of 50
#   ip     e4m3   right 47   largest cosine 11   of 50
#   ip     i8     right 11   largest cosine 49   of 50
#   l2sq   f32    right 50   largest cosine  8   of 50
#   l2sq   e5m2   right 48   largest cosine  8   of 50
#   l2sq   e4m3   right 47   largest cosine  8   of 50
#   l2sq   i8     right  8   largest cosine 49   of 50
#   get() of [3, 4] and of [30, 40]: [76, 101] [76, 101]
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet usearch==2.26.6 numkong==7.8.6 numpy==2.4.6 || exit 2
"$work/venv/bin/python" - <<'PY'
import numpy as np
from usearch.index import Index

random = np.random.default_rng(0)
vectors = random.normal(size=(200, 16)).astype("float32")
vectors *= random.uniform(0.1, 10, size=(200, 1)).astype("float32")
questions = random.normal(size=(50, 16)).astype("float32")
units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
by_cosine = np.argmax(questions @ units.T, axis=1)
squares = ((questions[:, None] - vectors[None]) ** 2).sum(-1)
nearest = {"ip": np.argmax(questions @ vectors.T, axis=1), "l2sq": np.argmin(squares, axis=1)}

right = {}
cosine = {}
for metric, expected in nearest.items():
    for dtype in ("f32", "e5m2", "e4m3", "i8"):
        index = Index(ndim=16, metric=metric, dtype=dtype)
        index.add(np.arange(len(vectors)), vectors)
        first = np.array([matches[0].key for matches in index.search(questions, 1, exact=True)])
        right[metric, dtype] = int((first == expected).sum())
        cosine[metric, dtype] = int((first == by_cosine).sum())
        print(
            f"{metric:6} {dtype:6} right {right[metric, dtype]:2}"
            f"   largest cosine {cosine[metric, dtype]:2}   of {len(questions)}"
        )
index = Index(ndim=2, metric="ip", dtype="i8")
index.add(np.arange(2), np.array([[3, 4], [30, 40]], dtype="float32"))
short, long = (np.asarray(index.get(key)).tolist() for key in (0, 1))
print("get() of [3, 4] and of [30, 40]:", short, long)

for metric in nearest:
    assert right[metric, "f32"] == len(questions)
    assert right[metric, "e5m2"] > 40 and right[metric, "e4m3"] > 40
    assert right[metric, "i8"] < 15 and cosine[metric, "i8"] > 45
assert short == long
PY
