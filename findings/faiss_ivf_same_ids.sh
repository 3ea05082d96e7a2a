#!/usr/bin/env bash
# faiss-cpu 1.15.1, Python 3.11: after remove_ids, an IVF index gives new vectors the ids of vectors that it holds
#
# Valid input: an IVF index whose vectors were added with add (ids 0, 1, 2, ...); some are removed, and new ones
# are added with add, as for a corpus that is kept up to date.
#
# Expected: remove_ids of an IVF index leaves the ids of the others as they are (a flat index moves them up, both are
# documented). So the new vectors get ids that are free: 0 to 49 again, or 100 and up.
#
# Seen: the new ids start at the number of vectors left, 50, where ids 50 to 99 are all in use. Each of the new vectors
# has the id of an old one. Nothing is reported; a search returns the same id twice.
#
# Why it matters: retrieval looks passages up by these ids. A hit on a new passage shows the text of an old one, and
# removing the new one removes both. Only add_with_ids with a counter of one's own is safe after a removal.
#
# Output:
#   ids of 100 vectors after removing 0 to 49: 50 to 99
#   ids after adding 5 more: 55 vectors, twice there: [50, 51, 52, 53, 54]
#   the first new vector is found as id 50 at distance 0.000
#   the old vector with id 50 has distance 3.483
#   remove_ids([50]) removes 2 vectors
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet faiss-cpu==1.15.1 numpy==2.4.6 || exit 2
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'PY'
import faiss
import numpy as np

generator = np.random.default_rng(0)
old = generator.normal(size=(100, 4)).astype("float32")
new = generator.normal(size=(5, 4)).astype("float32")
quantizer = faiss.IndexFlatL2(4)
index = faiss.IndexIVFFlat(quantizer, 4, 2)
index.nprobe = 2
index.train(old)
index.add(old)
index.remove_ids(np.arange(50))


def ids() -> list[int]:
    _, found = index.search(old[:1], index.ntotal)
    return sorted(found[0].tolist())


left = ids()
print(f"ids of 100 vectors after removing 0 to 49: {left[0]} to {left[-1]}")
index.add(new)
after = ids()
twice = sorted({number for number in after if after.count(number) > 1})
print(f"ids after adding 5 more: {len(after)} vectors, twice there: {twice}")
distances, found = index.search(new[:1], 1)
hit = int(found[0, 0])
print(f"the first new vector is found as id {hit} at distance {distances[0, 0]:.3f}")
print(f"the old vector with id {hit} has distance {((new[0] - old[hit]) ** 2).sum():.3f}")
removed = index.remove_ids(np.array([hit]))
print(f"remove_ids([{hit}]) removes {removed} vectors")

assert left == list(range(50, 100))
assert twice == [50, 51, 52, 53, 54]
assert hit == 50
assert removed == 2
PY
