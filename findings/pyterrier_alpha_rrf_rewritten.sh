#!/usr/bin/env bash
# pyterrier-alpha 0.16.5, Python 3.11: RRFusion does not fuse the results of a rewritten query with those of the query
#
# Valid input: RRFusion(search, rewrite >> search): the results of 60 questions as they are, and of the same questions
# with added words, as an expansion of queries or a language model adds them. A document that both find has the same qid
# and docno in both.
#
# Expected: one row per question and document; its score is the sum of 1 / (k + rank) over both lists, and what both
# find comes first.
#
# Seen: each document comes once per wording of the query, with the score of one list. The lists are joined by qid,
# docno and the text of the query, and a rewritten query has another text. So nothing is summed, and the result is the
# two lists in turn: of ten rows, 7.6 are distinct documents. There is no warning. If the text is set back behind the
# second search, the result is that by hand. The operator `+` of PyTerrier joins by qid and docno.
#
# Why it matters: to search with several wordings of a question is what this fusion is often used for. It looks as if
# it did not help: recall is below that of a single search. A reader gets passages twice, in place of others.
#
# Output, of the first ten rows (means; three documents of 300 are relevant for each question):
#                             distinct  recall
#   question                     10.00    0.59
#   rewritten                    10.00    0.60
#   both by hand                 10.00    0.63
#   RRFusion                      7.60    0.54
#   RRFusion, text set back      10.00    0.63
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet pyterrier-alpha==0.16.5 pyterrier==1.1.2 pandas==2.3.3 numpy==2.4.6 || exit 2
HOME="$work" "$work/venv/bin/python" -W error::UserWarning - <<'PY'
import numpy as np
import pandas as pd
import pyterrier as pt
from pyterrier_alpha.fusion import RRFusion

QUESTIONS = 60
DOCUMENTS = 300
DEPTH = 30
K = 60
ADDED = " and some more words"
rng = np.random.default_rng(0)
relevant = np.zeros((QUESTIONS, DOCUMENTS), dtype=bool)
for row in relevant:
    row[rng.choice(DOCUMENTS, 3, replace=False)] = True
# What both wordings say of a document, and what only one of them says.
common = 2.2 * relevant + rng.normal(size=relevant.shape)
scores = {text: common + 0.5 * rng.normal(size=relevant.shape) for text in ("some words", "some words" + ADDED)}


def one_question(frame):
    row = frame.iloc[0]
    values = scores[row["query"]][int(row.qid)]
    best = np.argsort(-values)[:DEPTH]
    names = [f"d{number}" for number in best]
    return pd.DataFrame({"qid": row.qid, "query": row["query"], "docno": names, "score": values[best]})


search = pt.apply.by_query(one_question)
rewrite = pt.apply.query(lambda row: row["query"] + ADDED)
set_back = pt.apply.generic(lambda frame: frame.assign(query="some words"))
questions = pd.DataFrame({"qid": [str(number) for number in range(QUESTIONS)], "query": "some words"})


def lists(frame):
    frame = frame.sort_values("rank")
    return [frame[frame.qid == qid].docno.tolist() for qid in questions.qid]


def by_hand(first, second):
    points = {}
    for documents in (first, second):
        for rank, name in enumerate(documents):
            points[name] = points.get(name, 0) + 1 / (K + rank)
    return points, sorted(points, key=points.get, reverse=True)


plain = lists(search(questions))
rewritten = lists((rewrite >> search)(questions))
hand = [by_hand(first, second) for first, second in zip(plain, rewritten)]
fused = RRFusion(search, rewrite >> search, k=K)(questions)
fused_back = RRFusion(search, rewrite >> search >> set_back, k=K)(questions)
results = {
    "question": plain,
    "rewritten": rewritten,
    "both by hand": [order for _, order in hand],
    "RRFusion": lists(fused),
    "RRFusion, text set back": lists(fused_back),
}
numbers = {}
print(f"{'':26}distinct  recall")
for label, documents in results.items():
    tops = [row[:10] for row in documents]
    distinct = np.mean([len(set(row)) for row in tops])
    recall = np.mean([sum(relevant[n, int(name[1:])] for name in set(row)) / 3 for n, row in enumerate(tops)])
    numbers[label] = distinct, recall
    print(f"{label:24}{distinct:10.2f}{recall:8.2f}")
for row in fused_back.itertuples():
    assert abs(row.score - hand[int(row.qid)][0][row.docno]) < 1e-9
assert not fused_back.duplicated(["qid", "docno"]).any()
assert fused.score.max() <= 1 / K and fused.duplicated(["qid", "docno"]).sum() > 5 * QUESTIONS
assert numbers["RRFusion"][0] < 8 and numbers["RRFusion"][1] < numbers["both by hand"][1] - 0.05
PY
