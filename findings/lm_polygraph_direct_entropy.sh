#!/usr/bin/env bash
# lm-polygraph 0.7.0, Python 3.11: the "direct" SemanticEntropy counts a class once for each sample in it
#
# Valid input: entropy_estimation="direct"; sampled answers to a question, and the classes of equal meaning they are in,
# as the package's own calculators give them. The probability of a class is the part of the samples in it ("frequency"),
# or the sum of the probabilities of its different texts ("sum" with use_unique_responses=True).
#
# Expected: the entropy of the classes, the sum of -p log(p) over them: 0 if ten answers mean the same, log(10) if
# all differ, and no more than that. The docstring names the paper on SDLG for "direct"; the code of its authors sums
# over classes.
#
# Seen: -p log(p) of a class is added once for each sample in it. "mean" adds -log(p) once for each sample and divides
# by their number, which is right; "direct" adds p times as much and does not divide. So five answers of one meaning
# and five of another have a higher "entropy" than ten that all differ, and twice the samples give twice the "entropy".
# There is no warning.
#
# Why it matters: the estimate is used to find answers that are likely to be wrong. Of these 600 questions, where an
# answer is right as often as the share of its class says, "direct" tells wrong from right far worse than "mean".
#
# Output, for ten samples (size of the classes; entropy; "mean"; "direct"):
#   10                     0.00   0.00   0.00
#   9 1                    0.33   0.33   1.08
#   5 5                    0.69   0.69   3.47
#   4 3 3                  1.09   1.09   3.63
#   2 2 2 2 2              1.61   1.61   3.22
#   1 1 1 1 1 1 1 1 1 1    2.30   2.30   2.30
# for two answers, each of probability 0.5 (samples; entropy; "mean"; "direct"):
#    2   0.69   0.69   0.69
#   10   0.69   0.69   3.47
#   40   0.69   0.69  13.86
# for the 600 questions (part of the pairs of a wrong and a right answer where the wrong one has the higher value):
#   mean    0.77
#   direct  0.60
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet numpy==2.4.6 transformers==5.24.0 pillow==13.0.0 || exit 2
# Without its other dependencies: they are for models, data sets and a web page.
"$work/venv/bin/pip" install --quiet --no-deps lm-polygraph==0.7.0 || exit 2
TRANSFORMERS_VERBOSITY=error OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'PY'
import importlib.util
import sys
import types
import warnings

import numpy as np

# The module of the estimator is loaded without those of the whole package, which need its other dependencies.
(root,) = importlib.util.find_spec("lm_polygraph").submodule_search_locations
for name, folder in (
    ("lm_polygraph", root),
    ("lm_polygraph.utils", f"{root}/utils"),
    ("lm_polygraph.estimators", f"{root}/estimators"),
):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from lm_polygraph.estimators.semantic_entropy import SemanticEntropy

SAMPLES = 10
QUESTIONS = 600
MEANINGS = 30
warnings.simplefilter("error")


def statistics(questions, log_probability=None):
    """What the calculators give for questions whose samples have these classes, numbered as they appear."""
    to_sample = {}
    for number, row in enumerate(questions):
        to_sample[number] = [[n for n, value in enumerate(row) if value == one] for one in dict.fromkeys(row)]
    to_class = {}
    for number, classes in to_sample.items():
        to_class[number] = {sample: name for name, members in enumerate(classes) for sample in members}
    result = {
        "sample_texts": [[f"answer {value}" for value in row] for row in questions],
        "semantic_classes_entail": {"class_to_sample": to_sample, "sample_to_class": to_class},
    }
    if log_probability is not None:
        result["sample_log_probs"] = [[log_probability] * len(row) for row in questions]
    return result


def both(given, **options):
    return [SemanticEntropy(entropy_estimation=name, **options)(given) for name in ("mean", "direct")]


sizes = [(10,), (9, 1), (5, 5), (4, 3, 3), (2,) * 5, (1,) * 10]
questions = [[one for one, size in enumerate(row) for _ in range(size)] for row in sizes]
entropies = np.array([sum(-size / SAMPLES * np.log(size / SAMPLES) for size in row) for row in sizes])
mean, direct = both(statistics(questions), class_probability_estimation="frequency")
for row, *values in zip(sizes, entropies + 0.0, mean + 0.0, direct + 0.0):
    print(f"{' '.join(map(str, row)):20}" + "".join(f"{value:7.2f}" for value in values))
assert np.allclose(mean, entropies)
by_sample = [sum(-size * size / SAMPLES * np.log(size / SAMPLES) for size in row) for row in sizes]
assert np.allclose(direct, by_sample)
assert direct[2] > direct[-1] + 1 and entropies[2] < entropies[-1] - 1

for samples in (2, 10, 40):
    given = statistics([[0, 1] * (samples // 2)], np.log(0.5))
    values = [np.log(2), *(value[0] for value in both(given, use_unique_responses=True))]
    print(f"{samples:2}" + "".join(f"{value:7.2f}" for value in values))
    assert np.allclose(values, np.log(2) * np.array([1, 1, samples / 2]))

rng = np.random.default_rng(0)
questions = []
right = []
for _ in range(QUESTIONS):
    probabilities = rng.dirichlet(np.full(MEANINGS, 10 ** rng.uniform(-2, 1)))
    row = rng.choice(MEANINGS, SAMPLES, p=probabilities)
    questions.append(row.tolist())
    right.append(rng.random() < np.bincount(row).max() / SAMPLES)
right = np.array(right)
areas = []
for name, values in zip(("mean", "direct"), both(statistics(questions), class_probability_estimation="frequency")):
    wrong_values, right_values = values[~right, None], values[None, right]
    areas.append(((wrong_values > right_values) + (wrong_values == right_values) / 2).mean())
    print(f"{name:6}{areas[-1]:6.2f}")
assert areas[0] > areas[1] + 0.1
PY
