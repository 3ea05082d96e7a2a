#!/usr/bin/env bash
# bm25s 0.3.16, Python 3.11: a question whose words are all unknown finds the passages that have no words
#
# Valid input: four passages, one of them empty and one of stop words alone, indexed as the README shows with the class
# Tokenizer; and a question with a word that no passage has, as a misspelled name.
#
# Expected: every score is 0, so that the caller sees that nothing was found. This is what bm25s.tokenize leads to.
#
# Seen: Tokenizer gives a passage without words the token "", and a question without known words the same token. It is
# a rare token, so its weight is high: the passage of stop words and the empty one are first, with a higher score than
# a match of a usual word. With allow_empty=False the question has no tokens and the scores are 0.
#
# Why it matters: "score > 0" is the usual test for a hit of BM25. A model that searches step by step writes names that
# are not in the corpus, and gets a passage without content as the best one, which then counts in a hybrid ranking too.
#
# Output:
#   'capital'  Tokenizer: 0.226 'London is the capital of England.'     bm25s.tokenize: 0.191   allow_empty=False: 0.226
#   'Pariss'   Tokenizer: 0.358 'To be or not to be.'                   bm25s.tokenize: 0.000   allow_empty=False: 0.000
#   'the'      Tokenizer: 0.358 'To be or not to be.'                   bm25s.tokenize: 0.000   allow_empty=False: 0.000
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet bm25s==0.3.16 numpy==2.4.6 || exit 2
"$work/venv/bin/python" - <<'PY'
import bm25s
from bm25s.tokenization import Tokenizer

PASSAGES = ["Paris is the capital of France.", "", "To be or not to be.", "London is the capital of England."]
QUIET = {"show_progress": False}

tokenizer = Tokenizer(stopwords="en")
with_class = bm25s.BM25()
with_class.index(tokenizer.tokenize(PASSAGES, return_as="tuple", **QUIET), **QUIET)
with_function = bm25s.BM25()
with_function.index(bm25s.tokenize(PASSAGES, stopwords="en", **QUIET), **QUIET)


def best(retriever: bm25s.BM25, question: list | bm25s.tokenization.Tokenized) -> tuple[int, float]:
    """The number of the best passage, and its score."""
    numbers, scores = retriever.retrieve(question, k=1, **QUIET)
    return int(numbers[0, 0]), float(scores[0, 0])


def measured(question: str) -> tuple[tuple[int, float], float, float]:
    usual = best(with_class, tokenizer.tokenize([question], update_vocab=False, **QUIET))
    _, function = best(with_function, bm25s.tokenize(question, stopwords="en", **QUIET))
    tokens = tokenizer.tokenize([question], update_vocab=False, allow_empty=False, **QUIET)
    _, without = best(with_class, tokens)
    first = f"{usual[1]:.3f} {PASSAGES[usual[0]]!r}"
    print(f"{question!r:10} Tokenizer: {first:45} bm25s.tokenize: {function:.3f}   allow_empty=False: {without:.3f}")
    return usual, function, without


match, *_ = measured("capital")
misspelled = measured("Pariss")
stop_word = measured("the")
assert match[0] in (0, 3)
for usual, function, without in (misspelled, stop_word):
    assert usual[0] in (1, 2)
    assert usual[1] > match[1] > 0
    assert function == 0
    assert without == 0
PY
