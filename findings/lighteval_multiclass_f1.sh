#!/usr/bin/env bash
# lighteval 0.13.0, Python 3.11: the F1 of three classes counts all that is not a class, so that no model gets 0
#
# Valid input: the right class and the predicted class of some answers, each 0, 1 or 2, for `CorpusLevelF1Score` with
# `num_classes=3`. The metric `multi_f1_numeric` ("mf1") is this with `average="micro"`; GLUE's task `cb` has it.
#
# Expected: what `average` means in scikit-learn, which the docstring names. With "micro" the F1 of answers of one class
# each is their accuracy. With "macro" it is the mean of the classes' F1.
#
# Seen: for each class, scikit-learn's F1 is taken of the labels "is it" and "is it not", and both labels count as
# classes in the average. With "micro" the result is 1/3 + 2/3 of the accuracy: all wrong is 0.333, and half right is
# 0.667. With "macro" half of it is the F1 of "is it not": all wrong is 0.25. There is no warning.
#
# Why it matters: a model that is always wrong seems to guess, and differences between models shrink to two thirds.
# Figures of CB do not compare with those of SuperGLUE, which are the mean of the classes' F1.
#
# Output (by scikit-learn; by lighteval):
#                                  micro            macro
#   all right                  1.000 1.000      1.000 1.000
#   half right                 0.500 0.667      0.500 0.625
#   all wrong                  0.000 0.333      0.000 0.250
#   always the first class     0.333 0.556      0.167 0.350
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 nltk==3.9.1 scikit-learn==1.9.1 \
  sacrebleu==2.6.0 pytablewriter==1.2.1 pydantic==2.14.4 requests==2.34.2 pandas==3.1.1 || exit 2
# Without its other dependencies: they are for tasks and models.
"$work/venv/bin/pip" install --quiet --no-deps lighteval==0.13.0 || exit 2
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - <<'PY'
from lighteval.metrics.metrics_corpus import CorpusLevelF1Score
from lighteval.metrics.sample_preparator import LogprobCorpusMetricInput
from sklearn.metrics import f1_score

CLASSES = 3
RIGHT = [0, 1, 2] * 4


def by_lighteval(predictions, average):
    items = [LogprobCorpusMetricInput(golds=gold, preds=pred) for gold, pred in zip(RIGHT, predictions)]
    return CorpusLevelF1Score(average=average, num_classes=CLASSES).compute_corpus(items)


wrong = [(label + 1) % CLASSES for label in RIGHT]
print(f"{'':28}   micro            macro")
for name, predictions in (
    ("all right", RIGHT),
    ("half right", RIGHT[:6] + wrong[6:]),
    ("all wrong", wrong),
    ("always the first class", [0] * len(RIGHT)),
):
    accuracy = sum(a == b for a, b in zip(RIGHT, predictions)) / len(RIGHT)
    cells = []
    for average in ("micro", "macro"):
        expected = f1_score(RIGHT, predictions, average=average)
        seen = by_lighteval(predictions, average)
        cells.append(f"{expected:.3f} {seen:.3f}")
        if average == "micro":
            assert abs(expected - accuracy) < 1e-9
            assert abs(seen - (1 + 2 * accuracy) / 3) < 1e-9
        else:
            negatives = [
                f1_score([y != k for y in RIGHT], [y != k for y in predictions]) for k in range(CLASSES)
            ]
            assert abs(seen - (expected + sum(negatives) / CLASSES) / 2) < 1e-9
    print(f"{name:26} {'      '.join(cells)}")
PY
