#!/usr/bin/env bash
# lighteval 0.13.0, Python 3.11: the F1 of an answer takes each word once, however often it is written
#
# Valid input: a right answer and a predicted one, as strings, for `F1_score` (the metric `f1_score`, which the task
# QASPER has).
#
# Expected: "F1 is computed over the bag of words of the golds and predictions", as the docstring says, and as the
# scripts of SQuAD, HotpotQA and QASPER do: a word counts as often as it occurs. "Paris" four times has four words, of
# which one matches "Paris": precision 0.25, F1 0.4.
#
# Seen: both texts become sets of words. Repetitions cost nothing, and an answer with half of the words of "New York New
# York" is all of it.
#
# Why it matters: a small model that fails repeats itself. Such answers get full marks, and a reward by this score does
# not stop them.
#
# Output (by hand; by lighteval):
#   Paris                        Paris                        1.000 1.000
#   Paris                        Paris Paris Paris Paris      0.400 1.000
#   the cat sat on the mat       the cat sat on mat           0.909 1.000
#   New York New York            New York                     0.667 1.000
#   Paris                        Rome                         0.000 0.000
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 nltk==3.9.1 scikit-learn==1.9.1 \
  sacrebleu==2.6.0 pytablewriter==1.2.1 pydantic==2.14.4 requests==2.34.2 pandas==3.1.1 || exit 2
# Without its other dependencies: they are for tasks and models.
"$work/venv/bin/pip" install --quiet --no-deps lighteval==0.13.0 || exit 2
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - <<'PY'
from collections import Counter

from lighteval.metrics.metrics_sample import F1_score


def by_hand(gold, prediction):
    common = (Counter(gold.split()) & Counter(prediction.split())).total()
    return 2 * common / (len(gold.split()) + len(prediction.split()))


metric = F1_score()
for gold, prediction, expected, value in (
    ("Paris", "Paris", 1, 1),
    ("Paris", "Paris Paris Paris Paris", 0.4, 1),
    ("the cat sat on the mat", "the cat sat on mat", 10 / 11, 1),
    ("New York New York", "New York", 2 / 3, 1),
    ("Paris", "Rome", 0, 0),
):
    seen = metric.compute_one_item(gold=gold, pred=prediction)
    print(f"{gold:28} {prediction:28} {by_hand(gold, prediction):.3f} {seen:.3f}")
    assert abs(by_hand(gold, prediction) - expected) < 1e-9 and abs(seen - value) < 1e-9
PY
