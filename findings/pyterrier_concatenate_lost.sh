#!/usr/bin/env bash
# pyterrier 1.1.2, Python 3.11: `^` loses all documents of a question for which its left side finds nothing
#
# Valid input: a search by keywords, and a dense one, as functions for pt.apply.by_query. `keyword ^ dense` is to put
# the documents of the dense search behind those of the search by keywords, without repeating any. The search by
# keywords finds two documents for 26 of 40 questions, and none for the other 14. The dense one finds ten for each, the
# relevant one among them.
#
# Expected: for the 26 questions, the two documents and then the others of the dense search; for the 14, those of the
# dense search alone. So the relevant document is always found.
#
# Seen: for the 14, nothing. The scores of the right side are shifted below the lowest score on the left, and the join
# that looks it up keeps only questions that have one. The 26 keep nothing of the right side either: what is on both
# sides is taken out by the labels of its rows. by_query labels the rows of each question from 0, so the rows of all
# other questions that have the same label go as well. With new labels the 26 are right, but the 14 are still empty.
#
# Why it matters: the right side is there for what the left one misses, and is dropped just there. Nothing is raised;
# in an experiment such a question counts as 0. The pair is worse here than the dense search alone, and one may blame
# the search by keywords for it.
#
# Output (mean number of documents, and part of the questions with the relevant one among them):
#                                     documents        relevant found
#                                      26      14        26      14     all
#   dense                           10.00   10.00      1.00    1.00    1.00
#   by hand                         11.00   10.00      1.00    1.00    1.00
#   keyword ^ dense                  2.00    0.00      1.00    0.00    0.65
#   keyword ^ dense, new labels     11.00    0.00      1.00    0.00    0.65
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet pyterrier==1.1.2 pandas==2.3.3 numpy==2.4.6 || exit 2
HOME="$work" "$work/venv/bin/python" -W error::UserWarning - <<'PY'
import numpy as np
import pandas as pd
import pyterrier as pt

QUESTIONS = 40
DOCUMENTS = 300
rng = np.random.default_rng(0)
order = [rng.permutation(DOCUMENTS) for _ in range(QUESTIONS)]
# The search by keywords finds the relevant document, which the dense one has somewhere in its ten, and another one.
place = rng.integers(0, 10, QUESTIONS)
without = [number % 3 == 0 for number in range(QUESTIONS)]


def names(numbers):
    return [f"d{number}" for number in numbers]


def dense_documents(question):
    return names(order[question][:10])


def keyword_documents(question):
    numbers = [order[question][50], order[question][place[question]]]
    return [] if without[question] else names(numbers)


def search(documents):
    def one_question(frame):
        row = frame.iloc[0]
        hits = documents(int(row.qid))
        scores = np.arange(len(hits), 0, -1) / 10
        return pd.DataFrame({"qid": [row.qid] * len(hits), "query": row["query"], "docno": hits, "score": scores})

    return pt.apply.by_query(one_question)


keyword = search(keyword_documents)
dense = search(dense_documents)
new_labels = pt.apply.generic(lambda frame: frame.reset_index(drop=True))
questions = pd.DataFrame({"qid": [str(number) for number in range(QUESTIONS)], "query": "some words"})


def lists(frame):
    frame = frame.sort_values("rank")
    return [frame[frame.qid == qid].docno.tolist() for qid in questions.qid]


def by_hand(question):
    first = keyword_documents(question)
    return first + [name for name in dense_documents(question) if name not in first]


right = [by_hand(question) for question in range(QUESTIONS)]
results = {
    "dense": lists(dense(questions)),
    "by hand": right,
    "keyword ^ dense": lists((keyword ^ dense)(questions)),
    "keyword ^ dense, new labels": lists((keyword ^ (dense >> new_labels))(questions)),
}
empty = np.array(without)
print(f"{'':34}documents        relevant found")
print(f"{'':27}{sum(~empty):10}{sum(empty):8}{sum(~empty):10}{sum(empty):8}     all")
for label, documents in results.items():
    sizes = np.array([len(row) for row in documents])
    hits = np.array([f"d{order[n][place[n]]}" in row for n, row in enumerate(documents)])
    print(f"{label:27}{sizes[~empty].mean():10.2f}{sizes[empty].mean():8.2f}", end="")
    print(f"{hits[~empty].mean():10.2f}{hits[empty].mean():8.2f}{hits.mean():8.2f}")
    if label in ("dense", "by hand"):
        assert hits.all()
    else:
        assert all(documents[n] == [] for n in range(QUESTIONS) if empty[n])
labelled = results["keyword ^ dense, new labels"]
assert all(labelled[n] == right[n] for n in range(QUESTIONS) if not empty[n])
cut = results["keyword ^ dense"]
assert all(cut[n] == keyword_documents(n) for n in range(QUESTIONS))
PY
