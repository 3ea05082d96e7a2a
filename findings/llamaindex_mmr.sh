#!/usr/bin/env bash
# llama-index-core 0.14.25, Python 3.11: MMR compares with the last result only, and ignores the threshold of the query
#
# Valid input: SimpleVectorStore, the standard store, with the query mode MMR; first six vectors in three pairs of near
# doubles, then 20 topics of five passages each. `mmr_threshold` is a field of VectorStoreQuery, "only for mmr".
#
# Expected: maximal marginal relevance of Carbonell and Goldstein (1998). The next result has the greatest threshold *
# similarity to the question - (1 - threshold) * greatest similarity to one of the results so far.
#
# Seen: what is subtracted is the similarity to the last result alone, not to those before it. The double of the first
# result comes third, before a passage that is new. Ten results come from four topics, where with thresholds of 0.2
# and 0.5 those of the paper come from ten. And the threshold of the query is not read, so that 0.2, 0.5 and 0.9 give
# the same. It counts only as an argument of the store's query() itself.
#
# Why it matters: MMR is there to fill a short prompt with passages that differ. Here it goes to and fro between a few
# topics, and the passages repeat each other. Tuning the threshold, if it has an effect at all, tunes something else.
#
# Output:
#   threshold 0.5, first three: by the paper a b c; SimpleVectorStore a b a'
#   topics among ten results:  by the paper   threshold as argument   threshold in the query
#   threshold 0.2                      10.0                     4.1                      3.9
#   threshold 0.5                      10.0                     3.9                      3.9
#   threshold 0.9                       5.1                     3.6                      3.9
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet llama-index-core==0.14.25 numpy==2.4.6 || exit 2
"$work/venv/bin/python" -W ignore - <<'PY'
import numpy as np
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import VectorStoreQuery, VectorStoreQueryMode


def unit(vectors) -> np.ndarray:
    vectors = np.asarray(vectors, dtype=float)
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def store_of(vectors: np.ndarray) -> SimpleVectorStore:
    store = SimpleVectorStore()
    store.add([TextNode(id_=str(place), text="", embedding=vector.tolist()) for place, vector in enumerate(vectors)])
    return store


def seen(store: SimpleVectorStore, question: np.ndarray, count: int, threshold: float, **settings) -> list[int]:
    query = VectorStoreQuery(
        query_embedding=question.tolist(),
        similarity_top_k=count,
        mode=VectorStoreQueryMode.MMR,
        mmr_threshold=threshold,
    )
    return [int(number) for number in store.query(query, **settings).ids]


def by_the_paper(vectors: np.ndarray, question: np.ndarray, count: int, threshold: float, last: int = 0) -> list[int]:
    """With `last`, only so many of the last results count."""
    chosen: list[int] = []
    for _ in range(count):
        worth = threshold * (vectors @ question)
        if chosen:
            worth -= (1 - threshold) * (vectors @ vectors[chosen[-last:]].T).max(axis=1)
        worth[chosen] = -np.inf
        chosen.append(int(worth.argmax()))
    return chosen


NAMES = ["a", "a'", "b", "b'", "c", "c'"]
vectors = unit(
    [[1, 0.30, 0, 0], [1, 0.31, 0.01, 0], [1, 0, 0.9, 0], [1, 0, 0.91, 0.01], [1, 0, 0, 1.0], [1, 0.01, 0, 1.01]]
)
question = unit([1, 0, 0, 0])
store = store_of(vectors)
right = by_the_paper(vectors, question, 4, 0.5)
found = seen(store, question, 4, 0.5)
print("threshold 0.5, first three: by the paper", *(NAMES[place] for place in right[:3]), end="; ")
print("SimpleVectorStore", *(NAMES[place] for place in found[:3]))
assert right[:3] == [0, 2, 4]
assert found[:3] == [0, 2, 1]

random = np.random.default_rng(0)
topics = random.normal(size=(20, 32))
vectors = unit(np.repeat(topics, 5, axis=0) + 0.2 * random.normal(size=(100, 32)))
store = store_of(vectors)
questions = unit(random.normal(size=(10, 32)) + topics.sum(axis=0) / 4)
print("topics among ten results:  by the paper   threshold as argument   threshold in the query")
for threshold in (0.2, 0.5, 0.9):
    tables = [
        [by_the_paper(vectors, question, 10, threshold) for question in questions],
        [seen(store, question, 10, threshold, mmr_threshold=threshold) for question in questions],
        [seen(store, question, 10, threshold) for question in questions],
    ]
    paper, argument, field = (np.mean([len({place // 5 for place in places}) for places in lists]) for lists in tables)
    print(f"threshold {threshold}              {paper:12.1f}   {argument:21.1f}   {field:22.1f}")
    assert tables[1] == [by_the_paper(vectors, question, 10, threshold, last=1) for question in questions]
    assert tables[2] == [by_the_paper(vectors, question, 10, 0.5, last=1) for question in questions]
    assert argument < paper
PY
