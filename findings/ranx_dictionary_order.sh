#!/usr/bin/env bash
# ranx 0.3.21, Python 3.11: dictionaries are paired by position, and a fusion takes the order of insertion as the ranks
#
# Valid input: judgments and results as dictionaries, which the signature of `evaluate` names, with equal questions in
# both; and runs filled with `add_score`, given to `fuse` with the method "rrf".
#
# Expected: the judgments of q1 are compared with the results of q1, and ranks come from scores.
#
# Seen: evaluate only checks that both have the same keys. A dictionary is then taken in its own order, while Qrels and
# Run are sorted by the name of the question; the n-th of one is compared with the n-th of the other. So results that
# are all right get 0.833 if two questions have changed places, and 0.083 if Qrels has sorted q10 before q2. Qrels with
# Run is right. fuse does not sort what add_score has left unsorted: if the worst passage was added first, it wins. To
# evaluate the same runs sorts them in place, and the next fusion has the opposite order.
#
# Why it matters: results are gathered in the order in which questions are answered, and judgments have that of a file.
# The two are rarely equal, and nothing but a low number tells of it. The fusion depends on whether somebody has
# measured its parts before: a notebook gives another ranking when one cell is left out.
#
# Output:
#   evaluate  dictionary, dictionary                        1.000
#   evaluate  dictionary, dictionary with q2 before q1      0.833
#   evaluate  Qrels, dictionary                             0.083
#   evaluate  Qrels, Run                                    1.000
#   fuse      two equal runs of add_score                   worst good best
#   fuse      the same two runs, after evaluate             best good worst
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet ranx==0.3.21 numba==0.68.1 numpy==2.4.6 || exit 2
"$work/venv/bin/python" -W ignore - <<'PY'
from ranx import Qrels, Run, evaluate, fuse

# Twelve questions; for each one its own passage is the first one.
JUDGED = {f"q{n}": {f"p{n}": 1} for n in range(1, 13)}
FOUND = {f"q{n}": {f"p{n}": 2.0, "other": 1.0} for n in range(1, 13)}
SWAPPED = {question: FOUND[question] for question in ("q2", "q1", *list(FOUND)[2:])}
assert SWAPPED == FOUND


def measured(label: str, qrels, run) -> float:
    mrr = float(evaluate(qrels, run, "mrr"))
    print(f"evaluate  {label:45} {mrr:.3f}")
    return mrr


assert measured("dictionary, dictionary", JUDGED, FOUND) == 1
assert 0.83 < measured("dictionary, dictionary with q2 before q1", JUDGED, SWAPPED) < 0.84
assert 0.08 < measured("Qrels, dictionary", Qrels(JUDGED), FOUND) < 0.09
assert measured("Qrels, Run", Qrels(JUDGED), Run(FOUND)) == 1


def filled() -> Run:
    run = Run()
    for passage, score in (("worst", 1.0), ("good", 2.0), ("best", 3.0)):
        run.add_score("question", passage, score)
    return run


def fused(label: str, runs: list[Run]) -> list[str]:
    order = list(fuse(runs, method="rrf").run["question"])
    print(f"fuse      {label:45} {' '.join(order)}")
    return order


runs = [filled(), filled()]
assert fused("two equal runs of add_score", runs) == ["worst", "good", "best"]
for run in runs:
    evaluate(Qrels({"question": {"best": 1}}), run, "mrr")
assert fused("the same two runs, after evaluate", runs) == ["best", "good", "worst"]
PY
