#!/usr/bin/env bash
# pylate 1.6.0, Python 3.11: the order of two documents depends on the length of a third one
#
# Valid input: `rank.rerank` with embeddings of one query and of its documents, which have one or two tokens.
#
# Expected: the score of a document is the sum over the query's tokens of the greatest similarity to one of its own
# tokens (MaxSim), whatever is ranked beside it.
#
# Seen: shorter documents are filled up with zeros to the length of the longest one, and the zeros are not masked. They
# count as tokens of similarity 0: in all but the longest document a query token never adds less than 0.
#
# Why it matters: nothing is raised. A document that contradicts a query token is lifted above one that merely misses it,
# but only if a longer document is in the same list. So scores of different lists cannot be compared, and a list cut in
# two is ordered otherwise. `scores.colbert_scores` has masks for it; `rerank` passes none.
#
# Output (scores in the order of the result):
#   a and b     b 0.35  a 0.20
#   a, b and c  a 0.80  b 0.40  c 0.10
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet 'torch==2.13.0' numpy==2.4.6 transformers==5.3.0 sentence-transformers==5.3.0 \
    datasets==5.2.0 accelerate==1.15.0 pandas==3.1.1 ujson==5.12.0 fastkmeans==0.5.0 || exit 2
# Without its other dependencies: they are for indexes.
"$work/venv/bin/pip" install --quiet --no-deps pylate==1.6.0 || exit 2
"$work/venv/bin/python" -W ignore - <<'PY'
import torch
from pylate import rank

query = torch.eye(3)[:2]  # two tokens
documents = {
    "a": [[0.8, -0.6, 0.0]],
    "b": [[0.4, -0.05, 0.9]],
    "c": [[0.1, 0.0, 1.0], [0.0, 0.0, 1.0]],
}


def reranked(names):
    """Returns the names and scores of documents as `rerank` orders them."""
    (results,) = rank.rerank(
        documents_ids=[list(names)],
        queries_embeddings=[query],
        documents_embeddings=[[torch.tensor(documents[name]) for name in names]],
    )
    return [(result["id"], round(result["score"], 2)) for result in results]


def max_sim(name):
    return round((query @ torch.tensor(documents[name]).T).max(dim=1).values.sum().item(), 2)


for label, names in (("a and b", "ab"), ("a, b and c", "abc")):
    results = reranked(names)
    print(f"{label:10}  " + "  ".join(f"{name} {score:.2f}" for name, score in results))
    right = sorted(((name, max_sim(name)) for name in names), key=lambda pair: -pair[1])
    assert (results == right) == (names == "ab")
assert [name for name, _ in results] == ["a", "b", "c"]
PY
