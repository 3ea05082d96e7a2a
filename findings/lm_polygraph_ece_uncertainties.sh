#!/usr/bin/env bash
# lm-polygraph 0.7.0, Python 3.11: ECE calls every answer with an uncertainty above 0 perfectly calibrated
#
# Valid input: uncertainties between 0 and 1 by two estimators of the package, and whether the answer was right (0, 1).
# Verbalized1S reads the confidence that the model wrote, and gives 1 minus it; LabelProb gives 1 minus the share of the
# sampled answers that mean the same as most of them. 100 answers in each row.
#
# Expected: the expected calibration error, the mean gap between the confidence and the part that was right. A model
# that says 0.9 and is right in 90 of 100 cases has 0, one that is never right has 0.9. All these
# metrics are documented to take uncertainties, the less sure the higher. With normalize=True they are stretched to the
# range from 0 to 1 before, so the default is for values that have such a range of their own.
#
# Seen: by default the confidence is taken to be minus the uncertainty, not 1 minus it. These values are below all bins,
# from 0 to 1, and an answer in no bin adds nothing to the sum, though it counts for the mean. So the result is 0,
# whatever the labels are. Only the surest answers, with an uncertainty of exactly 0, are in a bin: they count as having
# a confidence of 0. If all of these are right, the error is 1; if all are wrong, it is 0. There is no warning. Minus
# the confidence, as no estimator here gives it, has the right result. With normalize=True the least sure answers of a
# set always count as 0 and the surest as 1: a calibrated model with confidences from 0.5 to 0.9 has an error of 0.24.
#
# Why it matters: 0 is the best value there is. A model that is sure and wrong gets it, one that is sure and right does
# not, and to choose by this metric is to choose the worst.
#
# Output (by hand; ECE; ECE of minus the confidence; ECE with normalize=True):
#                                            by hand    ECE  minus  normalize
#     1.0, right in 100 of 100 cases            0.00   1.00   0.00       1.00
#     1.0, right in none                        1.00   0.00   1.00       0.00
#     0.9, right in 90                          0.00   0.00   0.00       0.90
#     0.9, right in none                        0.90   0.00   0.90       0.00
#     0.5 ... 0.9, right in 50 % ... 90 %       0.00   0.00   0.00       0.24
#     0.5 ... 0.9, right in 50 % ... 10 %       0.40   0.00   0.40       0.46
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet numpy==2.4.6 scipy==1.17.1 scikit-learn==1.9.1 || exit 2
# Without its other dependencies: they are for models, data sets and a web page.
"$work/venv/bin/pip" install --quiet --no-deps lm-polygraph==0.7.0 || exit 2
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W error - <<'PY'
import importlib.util
import sys
import types

import numpy as np

# The modules used are loaded without those of the whole package, which need its other dependencies.
(root,) = importlib.util.find_spec("lm_polygraph").submodule_search_locations
for name in ("lm_polygraph", "lm_polygraph.utils", "lm_polygraph.estimators", "lm_polygraph.ue_metrics"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [root + name.removeprefix("lm_polygraph").replace(".", "/")]
for name, part in (("PIL", "Image"), ("transformers", "AutoProcessor")):  # For models that read images.
    sys.modules[name] = types.ModuleType(name)
    setattr(sys.modules[name], part, None)
from lm_polygraph.estimators.label_prob import LabelProb
from lm_polygraph.estimators.verbalized_1s import Verbalized1S
from lm_polygraph.ue_metrics.ece import ECE

SAMPLES = 10


def verbalized(confidences):
    texts = [f"The answer is 7. My confidence is {confidence}." for confidence in confidences]
    return Verbalized1S(r"confidence is (\d\.\d+)\.")({"greedy_texts": texts})


def samples(confidences):
    """By the classes of equal meaning of ten sampled answers: one class of that share, the others of one answer."""
    sizes = [round(SAMPLES * confidence) for confidence in confidences]
    classes = [[list(range(size))] + [[number] for number in range(size, SAMPLES)] for size in sizes]
    of_sample = [[0] * size + list(range(1, SAMPLES - size + 1)) for size in sizes]
    stats = {"class_to_sample": dict(enumerate(classes)), "sample_to_class": dict(enumerate(of_sample))}
    return LabelProb()({"semantic_classes_entail": stats})


def by_hand(confidences, right):
    """No two confidences here are in one of the 20 bins."""
    groups = [confidences == value for value in np.unique(confidences)]
    return sum(group.sum() * abs(confidences[group].mean() - right[group].mean()) for group in groups) / len(right)


print(f"{'':40} by hand    ECE  minus  normalize")
for label, groups in (
    ("1.0, right in 100 of 100 cases", [(1.0, 100, 100)]),
    ("1.0, right in none", [(1.0, 100, 0)]),
    ("0.9, right in 90", [(0.9, 100, 90)]),
    ("0.9, right in none", [(0.9, 100, 0)]),
    ("0.5 ... 0.9, right in 50 % ... 90 %", [(n / 10, 20, 2 * n) for n in range(5, 10)]),
    ("0.5 ... 0.9, right in 50 % ... 10 %", [(n / 10, 20, 2 * (10 - n)) for n in range(5, 10)]),
):
    confidences = np.repeat([group[0] for group in groups], [group[1] for group in groups])
    right = np.concatenate([np.arange(count) < hits for _, count, hits in groups]).astype(int)
    uncertainties = verbalized(confidences)
    assert np.allclose(uncertainties, 1 - confidences) and np.allclose(samples(confidences), uncertainties)
    default, sampled = (float(ECE()(values, right)) for values in (uncertainties, samples(confidences)))
    minus = float(ECE()(-confidences, right))
    stretched = float(ECE(normalize=True)(uncertainties, right))
    hand = by_hand(confidences, right)
    print(f"  {label:38}{hand:8.2f}{default:7.2f}{minus:7.2f}{stretched:11.2f}")
    assert default == sampled and abs(minus - hand) < 1e-9
    # Of the surest answers it is the part that was right, and of all others 0.
    assert default == (right.mean() if label.startswith("1.0") else 0)
    assert hand > 0 or stretched > 0.2
PY
