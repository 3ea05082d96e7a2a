#!/usr/bin/env bash
# trectools 0.0.50, Python 3.11: what was found for other questions changes the Rprec and the RBP of a question
#
# Valid input: a run and judgments, as files in the form of TREC. The scores are grades from 3 down, as a model that
# judges passages gives them, and each question has its own order. Some passages are results of two questions.
#
# Expected: the measures of a question come from its own results and judgments. Rprec is the part of relevant passages
# in its first R results, where R is their number. RBP is the sum of 0.2 * 0.8^(rank - 1) over its relevant passages;
# passages with equal scores may share their weights. removeUnjudged takes unjudged passages out before a measure.
#
# Seen: with pandas 3, which pip installs, get_rprec loses the names of the questions on its way and compares only the
# names of the passages. Here no question has its passage at rank 1, so all are 0; but two questions have found that of
# each other and get 1. get_rbp takes the last passage of a question and the first of the next one for equals if their
# scores are equal, and both get the mean of their weights; without the other questions it is right. removeUnjudged
# changes nothing in get_reciprocal_rank and get_rprec. It works in get_precision and get_ndcg.
#
# Why it matters: the numbers look reasonable and are the same each time. A passage that is a frequent wrong answer and
# right somewhere raises Rprec, which evaluate_all returns too. RBP depends on the names of the questions, which are
# sorted, and on which others are in the file. With pandas 2 Rprec is right, RBP is not.
#
# Output:
#                                     q1      q2      q3
#   Rprec by hand                  0.000   0.000   0.000
#   get_rprec                      1.000   1.000   0.000
#   RBP by hand                    0.160   0.160   0.160
#   get_rbp                        0.180   0.160   0.160
#   get_rbp, q1 alone              0.160
#   first relevant by hand         0.500   0.500   0.500
#   get_reciprocal_rank            0.500   0.500   0.500
#   without unjudged, by hand      0.500   0.500   1.000
#   with removeUnjudged            0.500   0.500   0.500
#   precision at 1, the same       0.000   0.000   1.000
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet trectools==0.0.50 pandas==3.1.1 numpy==2.4.6 scipy==1.17.1 || exit 2
"$work/venv/bin/python" -W ignore - "$work" <<'PY'
import sys
from pathlib import Path

from trectools import TrecEval, TrecQrel, TrecRun

# The results, best first. "a", "b" and "c" are judged; "a" is the answer of q1, "b" of q2, "c" of q3.
FOUND = {
    "q1": [("b", 3), ("a", 2)],
    "q2": [("a", 2), ("b", 1)],
    "q3": [("u", 3), ("c", 2)],
}
ANSWERS = {"q1": "a", "q2": "b", "q3": "c"}
JUDGED = ["a", "b", "c"]
WORK = Path(sys.argv[1])


def evaluation(questions: list[str]) -> TrecEval:
    run = [
        f"{question} Q0 {passage} {rank} {score} system"
        for question in questions
        for rank, (passage, score) in enumerate(FOUND[question], 1)
    ]
    judgments = [
        f"{question} 0 {passage} {int(passage == ANSWERS[question])}" for question in questions for passage in JUDGED
    ]
    (WORK / "run").write_text("\n".join(run) + "\n")
    (WORK / "judgments").write_text("\n".join(judgments) + "\n")
    return TrecEval(TrecRun(str(WORK / "run")), TrecQrel(str(WORK / "judgments")))


def row(label: str, values: list[float]) -> list[float]:
    print(f"{label:28}" + "".join(f"{value:8.3f}" for value in values))
    return [round(value, 6) for value in values]


def seen(label: str, frame, questions: list[str]) -> list[float]:
    return row(label, frame.iloc[:, 0].reindex(questions).fillna(0).tolist())


def rank(question: str, *, judged: bool) -> int:
    results = [passage for passage, _ in FOUND[question] if passage in JUDGED or not judged]
    return results.index(ANSWERS[question]) + 1


questions = list(FOUND)
all_of_them = evaluation(questions)
print(f"{'':28}" + "".join(f"{question:>8}" for question in questions))

rprec = row("Rprec by hand", [float(rank(question, judged=False) == 1) for question in questions])
assert rprec == [0, 0, 0]
assert seen("get_rprec", all_of_them.get_rprec(per_query=True), questions) == [1, 1, 0]

rbp = row("RBP by hand", [0.2 * 0.8 ** (rank(question, judged=False) - 1) for question in questions])
assert rbp == [0.16, 0.16, 0.16]
assert seen("get_rbp", all_of_them.get_rbp(per_query=True)[0], questions) == [0.18, 0.16, 0.16]
alone = evaluation(["q1"]).get_rbp(per_query=True)[0]
assert seen("get_rbp, q1 alone", alone, ["q1"]) == [0.16]

all_of_them = evaluation(questions)
first = row("first relevant by hand", [1 / rank(question, judged=False) for question in questions])
assert seen("get_reciprocal_rank", all_of_them.get_reciprocal_rank(per_query=True), questions) == first
first_judged = row("without unjudged, by hand", [1 / rank(question, judged=True) for question in questions])
assert first_judged == [0.5, 0.5, 1]
removed = all_of_them.get_reciprocal_rank(per_query=True, removeUnjudged=True)
assert seen("with removeUnjudged", removed, questions) == first
precision = all_of_them.get_precision(depth=1, per_query=True, removeUnjudged=True)
assert seen("precision at 1, the same", precision, questions) == [0, 0, 1]
PY
