#!/usr/bin/env bash
# fast-forward-indexes 0.8.0, Python 3.11: what was found for other questions decides the order of interpolated results
#
# Valid input: two rankings, one of BM25 and one of dense vectors, as `Ranking.from_run` takes them, and `interpolate`
# with normalize=True. For a second case a ranking of distances, multiplied by -1 so that more is better.
#
# Expected: normalization makes the scores of two retrievers comparable, so it goes from the least to the greatest score
# that a question has. The order of its results does not depend on which other questions are in the run, and a question
# has the same results alone. After the multiplication the nearest passage comes first.
#
# Seen: least and greatest score are those of all questions together. BM25 has greater scores for longer questions; one
# long question in the run takes most of the range, and for the others BM25 hardly counts. Multiplying by -1 leaves the
# rows as they are, so that `cut` keeps the farthest passage, and `rr_scores` gives it the first rank.
#
# Why it matters: nothing is raised. The result of a question on its own is not its result in an evaluation, and an
# alpha that was tuned on some questions means something else with others; `normalize` alone does the same. The
# documentation says only that scores are normalized to be in [0, 1], and that rankings can be multiplied.
#
# Output:
#   interpolated, alpha 0.5   q1 by hand                  q1 seen
#   q1 alone                  a 0.75  b 0.67  c 0.00      a 0.75  b 0.67  c 0.00
#   q1 and q2                 a 0.75  b 0.67  c 0.00      b 0.35  a 0.26  c 0.14
#   distances times -1        first
#   by hand                   b -0.2
#   cut(1)                    a -0.9
#   rr_scores().cut(1)        a 0.0164
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet numpy==1.26.4 pandas==2.3.3 || exit 2
# Without its other dependencies, torch among them: rankings are a module that does not need them.
"$work/venv/bin/pip" install --quiet --no-deps fast-forward-indexes==0.8.0 || exit 2
"$work/venv/bin/python" -W ignore - <<'PY'
import sysconfig
from importlib.util import module_from_spec, spec_from_file_location

spec = spec_from_file_location("ranking", f"{sysconfig.get_path('purelib')}/fast_forward/ranking.py")
module = module_from_spec(spec)
spec.loader.exec_module(module)
Ranking = module.Ranking

BM25 = {"q1": {"a": 12.0, "b": 10.0, "c": 9.0}, "q2": {"d": 60.0, "e": 5.0}}
DENSE = {"q1": {"a": 0.60, "b": 0.70, "c": 0.50}, "q2": {"d": 0.9, "e": 0.4}}


def scaled(scores):
    least, greatest = min(scores.values()), max(scores.values())
    return {name: (score - least) / (greatest - least) for name, score in scores.items()}


def by_hand(question):
    first, second = scaled(BM25[question]), scaled(DENSE[question])
    scores = {name: (first[name] + second[name]) / 2 for name in first}
    return dict(sorted(scores.items(), key=lambda item: -item[1]))


def seen(question, questions):
    first, second = (Ranking.from_run({name: run[name] for name in questions}) for run in (BM25, DENSE))
    return first.interpolate(second, 0.5, normalize=True)[question]


def line(scores, digits=2):
    return "  ".join(f"{name} {score:.{digits}f}" for name, score in scores.items())


print(f"{'interpolated, alpha 0.5':24}  {'q1 by hand':26}  q1 seen")
right = by_hand("q1")
for label, questions, order in (("q1 alone", ["q1"], "abc"), ("q1 and q2", ["q1", "q2"], "bac")):
    scores = seen("q1", questions)
    print(f"{label:24}  {line(right):26}  {line(scores)}")
    assert list(right) == list("abc") and list(scores) == list(order)

print(f"{'distances times -1':24}  first")
distances = {"a": 0.9, "b": 0.2, "c": 0.5}
nearest = min(distances, key=distances.get)
print(f"{'by hand':24}  {line({nearest: -distances[nearest]}, 1)}")
turned = Ranking.from_run({"q1": distances}) * -1
for label, ranking, digits in (("cut(1)", turned, 1), ("rr_scores().cut(1)", turned.rr_scores(), 4)):
    first = ranking.cut(1)["q1"]
    print(f"{label:24}  {line(first, digits)}")
    assert nearest == "b" and list(first) == ["a"]
PY
