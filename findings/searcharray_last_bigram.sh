#!/usr/bin/env bash
# searcharray 0.0.73, Python 3.11: edismax counts the last two words of a question twice, and knows no slop
#
# Valid input: an index of short texts, and edismax with qf and pf2, the field in which pairs of neighbouring words of
# the question count in addition; then with pf and ps, the slop: how far the words of a phrase may be apart.
#
# Expected: Solr's edismax, which the README promises. With pf2 each of the pairs adds its BM25 score once, as the
# explanation that edismax returns has it. With ps=1 a passage with one word in between has the phrase too.
#
# Seen: the score of the last pair is added again after the loop over the pairs. For three words "new york hotel", the
# pair "york hotel" weighs twice as much as "new york", and the wrong passage comes first. For two words, pf2 gives
# twice what pf gives for the same phrase. The explanation has each pair once. The arguments ps, ps2 and ps3 are taken
# and never used, while score(..., slop=1) of the index finds the phrase with a word in between.
#
# Why it matters: the package is there to try settings before they go to Solr. A boost of pf2 that is tuned here is too
# small or too great there, for each length of a question another way, and the order of the words of a question
# decides which pair is favoured. A grid over ps gives the same numbers everywhere, so the slop seems useless.
#
# Output:
#   new york hotel                                new york ...  ... york hotel
#   words and pairs, by hand                              1.11            0.95
#   edismax with pf2                                      1.11            1.28
#   explanation: (text:"new york")^1 (text:"york hotel")^1
#
#   new york                                      new york ...    new big york
#   words and phrase, by hand                             0.98            0.67
#   edismax with pf                                       0.98            0.67
#   edismax with pf2                                      1.46            0.67
#   words and phrase, slop 1, by hand                     0.98            1.11
#   edismax with pf, ps=1                                 0.98            0.67
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet searcharray==0.0.73 pandas==3.1.1 numpy==2.4.6 || exit 2
"$work/venv/bin/python" -W ignore - <<'PY'
import logging
from math import isclose, log

import pandas as pd
from searcharray import SearchArray
from searcharray.solr import edismax

logging.disable(logging.CRITICAL)

TEXTS = [
    "new york rooms and one hotel",
    "new rooms and one york hotel",
    "york hotel",
    "hotel with rooms",
    "old hotel",
    "cheap rooms",
    "new big york",
]
FRAME = pd.DataFrame({"text": SearchArray.index(TEXTS)})


def by_hand(phrase: str, slop: int = 0) -> list[float]:
    """The BM25 scores of the words as one phrase, as Lucene has them. A pair with words in between is worth less."""
    words, texts = phrase.split(), [text.split() for text in TEXTS]
    idf = 0.0
    for word in words:
        having = sum(word in text for text in texts)
        idf += log(1 + (len(texts) - having + 0.5) / (having + 0.5))
    mean = sum(map(len, texts)) / len(texts)
    scores = []
    for text in texts:
        count = sum(text[place : place + len(words)] == words for place in range(len(text)))
        if slop and set(words) <= set(text):
            between = text.index(words[1]) - text.index(words[0]) - 1
            count = 1 / (1 + between) if 0 <= between <= slop else 0
        scores.append(idf * count / (count + 1.2 * (0.25 + 0.75 * len(text) / mean)))
    return scores


def total(*parts: list[float]) -> list[float]:
    return [sum(scores) for scores in zip(*parts, strict=True)]


def close(some: list[float], others: list[float]) -> bool:
    return all(isclose(one, other, abs_tol=1e-5) for one, other in zip(some, others, strict=True))


def row(label: str, scores: list[float], places: tuple[int, ...]) -> None:
    print(f"{label:42}" + "".join(f"{scores[place]:16.2f}" for place in places))


def seen(question: str, **settings) -> list[float]:
    return edismax(FRAME, question, qf=["text"], **settings)[0].tolist()


QUESTION = "new york hotel"
words = [by_hand(word) for word in QUESTION.split()]
assert close(seen(QUESTION), total(*words))
right = total(*words, by_hand("new york"), by_hand("york hotel"))
pf2 = seen(QUESTION, pf2=["text"])
print(f"{QUESTION:42}" + "".join(f"{text:>16}" for text in ("new york ...", "... york hotel")))
row("words and pairs, by hand", right, (0, 1))
row("edismax with pf2", pf2, (0, 1))
print("explanation:" + edismax(FRAME, QUESTION, qf=["text"], pf2=["text"])[1].partition("~1")[2])
assert right[0] > right[1]
assert pf2[0] < pf2[1]
assert close(pf2, total(right, by_hand("york hotel")))

QUESTION = "new york"
words = [by_hand(word) for word in QUESTION.split()]
print()
print(f"{QUESTION:42}" + "".join(f"{text:>16}" for text in ("new york ...", "new big york")))
row("words and phrase, by hand", total(*words, by_hand(QUESTION)), (0, 6))
row("edismax with pf", seen(QUESTION, pf=["text"]), (0, 6))
row("edismax with pf2", seen(QUESTION, pf2=["text"]), (0, 6))
row("words and phrase, slop 1, by hand", total(*words, by_hand(QUESTION, slop=1)), (0, 6))
row("edismax with pf, ps=1", seen(QUESTION, pf=["text"], ps=1), (0, 6))
assert close(seen(QUESTION, pf=["text"]), total(*words, by_hand(QUESTION)))
assert close(seen(QUESTION, pf2=["text"]), total(*words, by_hand(QUESTION), by_hand(QUESTION)))
assert seen(QUESTION, pf=["text"], ps=1) == seen(QUESTION, pf=["text"], ps=0)
assert seen(QUESTION, pf2=["text"], ps2=1) == seen(QUESTION, pf2=["text"], ps2=0)
assert FRAME["text"].array.score(QUESTION.split())[6] == 0
assert FRAME["text"].array.score(QUESTION.split(), slop=1)[6] > 0
PY
