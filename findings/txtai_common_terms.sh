#!/usr/bin/env bash
# txtai 9.14.0, Python 3.11: with a rare word in the question, BM25 searches a few passages only, and not the best ones
#
# Valid input: a keyword index (`method="bm25"`, `terms=True`) of 1000 passages of 30 words. 20 usual words are in a
# fifth to a quarter of the passages each, all others are rare. 200 questions have two usual words; one passage, the
# right one, has each of them three times. Then each question gets a word more, as if a person had put a name into it:
# it is in 1 or in 5 passages, but not in the right one.
#
# Expected: BM25 over all passages, which has the right passage among the first 10 for all questions, with or without
# the added word. (A comment in the source says that words in more than a tenth of the passages are scored for those
# passages only that match the rarer words. Then the result would have 1 or 5 passages.)
#
# Seen: with the added word, the right passage is lost for 95 questions of 100, while the result still has 10 passages.
# The best 50 by the rare words, 5 times the limit, are taken first. If fewer passages have one, the 50 are filled with
# passages of score 0, those that a partition of the array leaves in these places. Usual words are counted for these 50
# alone, and the best of them are returned, with their right scores. Which ones depends on the order of the passages in
# the index, and on the limit: the first 10 of `limit=100` are better ones than those of `limit=10`. There is no
# warning. Without the rare word all is right, and so it is with `cutoff=1.0`, which is not documented.
#
# Why it matters: questions of people have names, and a name is a rare word. The results look plausible, as each has a
# usual word of the question; but it is as if one had searched 50 passages, not 1000. A hybrid search gets these lists.
#
# Output (share of questions with the right passage in the first 10; share of the 10 best scores by hand that the first
# 10 have):
#                         by hand       limit=10      limit=100       reversed     cutoff=1.0
#   two usual words          1.00     1.00  1.00     1.00  1.00     1.00  1.00     1.00  1.00
#   a word of 5 passages     1.00     0.02  0.53     0.54  0.85     0.04  0.52     1.00  1.00
#   a word of 1 passage      1.00     0.05  0.22     0.55  0.74     0.07  0.22     1.00  1.00
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet numpy==2.4.6 msgpack==1.2.4 regex==2026.11.19 || exit 2
# Without its other dependencies: they are for models.
"$work/venv/bin/pip" install --quiet --no-deps txtai==9.14.0 || exit 2
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W error - <<'PY'
import math
from collections import Counter

import numpy as np
from txtai.scoring import ScoringFactory

PASSAGES, QUESTIONS, LENGTH, DEPTH, K1 = 1000, 200, 30, 10, 1.2
rng = np.random.default_rng(0)
usual = [f"usual{letter}" for letter in "abcdefghijklmnopqrst"]
rare = [f"word{number}" for number in range(20000)]
passages = [[*rng.choice(usual, 6), *rng.choice(rare, LENGTH - 6)] for _ in range(PASSAGES)]
right = rng.choice(PASSAGES, QUESTIONS, replace=False)
questions = []
for number, passage in enumerate(right):
    question = list(rng.choice(usual, 2, replace=False))
    passages[passage][:6] = 3 * question
    questions.append(question)
# The added words, in place of a rare one.
others = np.setdiff1d(np.arange(PASSAGES), right)
for number in range(QUESTIONS):
    for label, count in (("one", 1), ("five", 5)):
        for passage in rng.choice(others, count, replace=False):
            passages[passage][rng.integers(6, LENGTH)] = f"{label}{number}"
counts = [Counter(words) for words in passages]
frequency = Counter(word for words in counts for word in words)
assert all(0.2 < frequency[word] / PASSAGES < 0.26 for word in usual)
assert all(len(words) == LENGTH for words in passages)


def by_hand(question):
    """The score of each passage. All have the mean length, so that there is nothing to normalize."""
    scores = np.zeros(PASSAGES)
    for word in question:
        idf = math.log(1 + (PASSAGES - frequency[word] + 0.5) / (frequency[word] + 0.5))
        times = np.array([words[word] for words in counts])
        scores += idf * times * (K1 + 1) / (times + K1)
    return scores


def index(order, terms=True):
    scoring = ScoringFactory.create({"method": "bm25", "terms": terms})
    scoring.index([(int(number), " ".join(passages[number]), None) for number in order])
    return scoring


plain, cutoff = index(range(PASSAGES)), index(range(PASSAGES), {"cutoff": 1.0})
turned = index(reversed(range(PASSAGES)))
searches = {
    "limit=10": lambda text: plain.search(text, DEPTH),
    "limit=100": lambda text: plain.search(text, 100)[:DEPTH],
    "reversed": lambda text: turned.search(text, DEPTH),
    "cutoff=1.0": lambda text: cutoff.search(text, DEPTH),
}
print(f"{'':22}by hand" + "".join(f"{label:>15}" for label in searches))
for label, added in (("two usual words", None), ("a word of 5 passages", "five"), ("a word of 1 passage", "one")):
    hits = {name: [] for name in ("hand", *searches)}
    shares = {name: [] for name in searches}
    for number, passage in enumerate(right):
        words = questions[number] + ([f"{added}{number}"] if added else [])
        scores = by_hand(words)
        best = np.sort(scores)[-DEPTH]
        hits["hand"].append((scores > scores[passage]).sum() < DEPTH)
        for name, search in searches.items():
            found = search(" ".join(words))
            assert len(found) == DEPTH and all(abs(score - scores[n]) < 1e-4 for n, score in found), name
            hits[name].append(passage in [n for n, _ in found])
            shares[name].append(np.mean([score > best - 1e-4 for _, score in found]))
    hit, share = ({name: np.mean(values) for name, values in all_values.items()} for all_values in (hits, shares))
    print(f"{label:22}{hit['hand']:7.2f}" + "".join(f"{hit[name]:9.2f}{share[name]:6.2f}" for name in searches))
    for name in searches:
        if added and name != "cutoff=1.0":
            assert hit[name] < (0.7 if name == "limit=100" else 0.15) and share[name] < 0.9, (label, name)
        else:
            assert hit[name] == share[name] == 1, (label, name)
    assert hit["hand"] == 1, label
PY
