#!/usr/bin/env bash
# rank_bm25 0.2.2, Python 3.11: the `delta` of BM25Plus has no effect on any ranking
#
# Valid input: six short passages and a long one, split into words; a question of two words; some values of `delta`.
#
# Expected: BM25+ of Lv and Zhai (2011), as in the overview that the module names (Trotman and others, 2014). A passage
# gets `delta` times the idf for each word of the question that it has, and nothing for a word that it has not. So a
# long passage with both words rises above a short one that repeats one of them, and one without them has the score 0.
#
# Seen: `delta` is added for all words of the question in all passages, also in those that have none of them. This is
# one and the same number for all passages of a question. The order is that of `delta=0`, which is plain BM25, for each
# question and each `delta`. Passages without any of the words have scores far above 0.
#
# Why it matters: BM25Plus is taken for texts of very different lengths, and `delta` is tuned on a development set. The
# tuning sees equal results everywhere and nobody learns why; a comparison of BM25 with BM25+ measures only another
# idf. To drop passages with the score 0 drops none. get_scores and get_batch_scores do the same.
#
# Output:
#   delta    by the paper: long, short, none     BM25Plus: long, short, none
#       0       0.95   2.77   0.00                  0.95   2.77   0.00
#       1       3.72   4.15   0.00                  3.72   5.54   2.77
#       2       6.49   5.54   0.00                  6.49   8.31   5.55
#      10      28.67  16.63   0.00                 28.67  30.49  27.73
#   passages with a score above 0: 3 by the paper, 7 of BM25Plus
#   500 random questions, delta 0 and 1: 500 rankings equal, by the paper 27
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet rank_bm25==0.2.2 numpy==2.4.6 || exit 2
"$work/venv/bin/python" - <<'PY'
from math import log

import numpy as np
from rank_bm25 import BM25Plus

PASSAGES = [
    ("solar panel " + "roof house street garden " * 15).split(),
    "solar solar solar price".split(),
    "the panel of judges".split(),
    *(["no", "such", "word"] for _ in range(4)),
]
QUESTION = ["solar", "panel"]
K1, B = 1.5, 0.75


def by_the_paper(passages: list[list[str]], question: list[str], delta: float) -> np.ndarray:
    mean = sum(map(len, passages)) / len(passages)
    scores = []
    for passage in passages:
        score = 0.0
        for word in question:
            count = passage.count(word)
            if count:
                idf = log((len(passages) + 1) / sum(word in other for other in passages))
                score += idf * (delta + count * (K1 + 1) / (count + K1 * (1 - B + B * len(passage) / mean)))
        scores.append(score)
    return np.array(scores)


def by_rank_bm25(passages: list[list[str]], question: list[str], delta: float) -> np.ndarray:
    index = BM25Plus(passages, k1=K1, b=B, delta=delta)
    scores = index.get_scores(question)
    assert np.allclose(index.get_batch_scores(question, list(range(len(passages)))), scores)
    return scores


def order(scores: np.ndarray) -> list[int]:
    return np.argsort(-scores.round(9), kind="stable").tolist()


print("delta    by the paper: long, short, none     BM25Plus: long, short, none")
for delta in (0, 1, 2, 10):
    right, seen = by_the_paper(PASSAGES, QUESTION, delta), by_rank_bm25(PASSAGES, QUESTION, delta)
    shown = ["".join(f"{scores[place]:7.2f}" for place in (0, 1, 3)) for scores in (right, seen)]
    print(f"{delta:5}    {shown[0]}               {shown[1]}")
    assert np.allclose(seen - by_rank_bm25(PASSAGES, QUESTION, 0), seen[3])
    assert seen[1] > seen[0]
    assert right[3] == 0
right, seen = by_the_paper(PASSAGES, QUESTION, 1), by_rank_bm25(PASSAGES, QUESTION, 1)
print(f"passages with a score above 0: {sum(right > 0)} by the paper, {sum(seen > 0)} of BM25Plus")
assert order(by_the_paper(PASSAGES, QUESTION, 2))[0] == 0
assert (seen > 0).all()

random = np.random.default_rng(0)
words = [f"w{number}" for number in range(40)]
weights = 1 / np.arange(1, 41)
weights /= weights.sum()
passages = [random.choice(words, size=size, p=weights).tolist() for size in random.integers(2, 200, size=60)]
equal = {by_the_paper: 0, by_rank_bm25: 0}
for _ in range(500):
    question = random.choice(words, size=3, replace=False).tolist()
    for score in equal:
        equal[score] += order(score(passages, question, 0)) == order(score(passages, question, 1))
print(f"500 random questions, delta 0 and 1: {equal[by_rank_bm25]} rankings equal, by the paper {equal[by_the_paper]}")
assert equal[by_rank_bm25] == 500
assert equal[by_the_paper] < 100
PY
