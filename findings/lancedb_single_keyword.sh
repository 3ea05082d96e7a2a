#!/usr/bin/env bash
# lancedb 0.40.0, Python 3.11: a single hit of the keywords counts nothing in the linear combination of a hybrid search
#
# Valid input: five passages with vectors and a full-text index, and a hybrid search with LinearCombinationReranker. Its
# weight is that of the vectors; at 0 only the keywords count. "E417" stands in one passage, "pump" in three.
#
# Expected: a passage that has the keywords gets more than it would get without them. If only the keywords count and one
# passage has them, it is the first.
#
# Seen: the scores of the keywords are scaled so that the least is 0 and the greatest 1. The score of a single hit
# becomes 0, which is also the score of passages that were not found. The keywords then have no influence: the order is
# that of the vectors, and at a weight of 0 all passages have the relevance 0. For distances 0 is the best value, for
# keywords the worst, and both are scaled by the same function. With a second, weaker hit the first one becomes 1.
#
# Why it matters: a name or the number of an error is what keywords are there for, and the rarer it is, the more often
# it has one hit. Nothing is raised, and `return_score="all"` shows the score of the hit as if it had counted.
# RRFReranker, the default, takes ranks and is not affected.
#
# Output:
#   weight  keywords     by hand    seen   first
#   0.0     E417           1.000   0.000   the engine does not start
#   0.0     E417 pump      1.000   1.000   E417 pump blocked
#   0.3     E417           0.976   0.276   the engine does not start
#   0.3     E417 pump      0.976   0.976   E417 pump blocked
#   0.7     E417           0.944   0.644   the engine does not start
#   0.7     E417 pump      0.944   0.944   E417 pump blocked
#   RRF     E417                           E417 pump blocked
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet lancedb==0.40.0 pyarrow==26.0.1 numpy==2.4.6 || exit 2
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - "$work" <<'PY'
import sys

import lancedb
import pyarrow as pa
from lancedb.rerankers import LinearCombinationReranker, RRFReranker

PASSAGES = {
    "the engine does not start": [1.0, 0.0],
    "the battery is empty": [0.9, 0.1],
    "E417 pump blocked": [0.8, 0.3],
    "a pump makes noise": [0.7, 0.4],
    "spare parts for the pump": [0.1, 0.9],
}
QUESTION = [1.0, 0.0]
FAULT = "E417 pump blocked"

vectors = pa.array(list(PASSAGES.values()), pa.list_(pa.float32(), 2))
table = lancedb.connect(f"{sys.argv[1]}/db").create_table("t", pa.table({"text": list(PASSAGES), "vector": vectors}))
table.create_fts_index("text")


def found(words: str, reranker) -> dict[str, float]:
    search = table.search(query_type="hybrid").vector(QUESTION).text(words).rerank(reranker).limit(len(PASSAGES))
    return {row["text"]: row["_relevance_score"] for row in search.to_list()}


def by_hand(weight: float) -> float:
    """The relevance of the passage with the best score of keywords."""
    distances = {text: sum((a - b) ** 2 for a, b in zip(vector, QUESTION)) for text, vector in PASSAGES.items()}
    nearness = 1 - distances[FAULT] / max(distances.values())
    return weight * nearness + (1 - weight)


print(f"{'weight':8}{'keywords':11}{'by hand':>9}{'seen':>8}   first")
for weight in (0.0, 0.3, 0.7):
    for words in ("E417", "E417 pump"):
        scores = found(words, LinearCombinationReranker(weight=weight))
        expected = by_hand(weight)
        first = next(iter(scores))
        print(f"{weight:<8}{words:11}{expected:9.3f}{scores[FAULT]:8.3f}   {first}")
        if words == "E417":
            assert first != FAULT and abs(expected - (1 - weight) - scores[FAULT]) < 1e-5
        else:
            assert first == FAULT and abs(expected - scores[FAULT]) < 1e-5
first = next(iter(found("E417", RRFReranker())))
print(f"{'RRF':8}{'E417':11}{'':17}   {first}")
assert first == FAULT
PY
