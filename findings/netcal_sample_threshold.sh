#!/usr/bin/env bash
# netcal 1.4.0, Python 3.11: bins below the `sample_threshold` of ACE and ECE count as perfectly calibrated
#
# Valid input: confidences and whether the answer was right, of two models. In each bin, the part that is right is below
# the confidence by the same gap: 0.25 for model A, which is sure most of the time, and 0.15 for model B.
#
# Expected: "Bins with an amount of samples below this threshold are not included into the miscalibration metrics", says
# the documentation of `sample_threshold`. As the gap is the same in all bins, a mean over those that are left is that
# gap for any threshold, with equal weights (ACE) as with weights by samples (ECE).
#
# Seen: confidence and part right of such a bin become 0, so its gap is 0, but it stays in the divisor: of the number of
# bins for ACE, of the number of samples for ECE. With a threshold of 50, ACE is 3/7 of the gap for model A. If no bin
# has enough samples, all three are 0, as for a model that is perfectly calibrated. There is no warning.
#
# Why it matters: the threshold is meant to keep bins of few samples out, since their gap is mostly chance. Instead, the
# more bins have few samples, the better a model looks: here A looks better calibrated than B. So do small test sets.
#
# Output:
#                       A: ACE     ECE     MCE   B: ACE     ECE     MCE
#   gap in all bins      0.250   0.250   0.250    0.150   0.150   0.150
#   threshold 1          0.250   0.250   0.250    0.150   0.150   0.150
#   threshold 50         0.107   0.230   0.250    0.150   0.150   0.150
#   threshold 250        0.071   0.179   0.250    0.000   0.000   0.000
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 scipy==1.17.1 scikit-learn==1.9.1 tqdm==4.70.1 || exit 2
# Without its other dependencies: they are for Gaussian processes and plots.
"$work/venv/bin/pip" install --quiet --no-deps netcal==1.4.0 || exit 2
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'PY'
import warnings

import numpy as np
from netcal.metrics import ACE, ECE, MCE

BINS = 10
warnings.simplefilter("error")
confidences = np.array([0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95])  # Each in the middle of a bin.
models = {  # The gap, and how many answers have each confidence.
    "A": (0.25, np.array([20, 20, 20, 20, 200, 300, 400])),
    "B": (0.15, np.array([140] * 7)),
}


def answers(gap, sizes):
    right = [np.arange(size) < round(size * (confidence - gap)) for size, confidence in zip(sizes, confidences)]
    return np.repeat(confidences, sizes), np.concatenate(right).astype(int)


def line(label, values):
    cells = "".join(f"{value:{9 if number % 3 == 0 else 8}.3f}" for number, value in enumerate(values))
    print(f"{label:16}{cells}")


print(f"{'':16}   A: ACE     ECE     MCE   B: ACE     ECE     MCE")
by_hand = [gap for gap, _ in models.values() for _ in range(3)]
line("gap in all bins", by_hand)
for gap, sizes in models.values():
    shares, right = answers(gap, sizes)
    gaps = [confidence - right[shares == confidence].mean() for confidence in confidences]
    assert np.allclose(gaps, gap)
for threshold in (1, 50, 250):
    seen, explained = [], []
    for gap, sizes in models.values():
        shares, right = answers(gap, sizes)
        seen += [metric(bins=BINS, sample_threshold=threshold).measure(shares, right) for metric in (ACE, ECE, MCE)]
        enough = sizes >= threshold
        explained += [gap * enough.mean(), gap * sizes[enough].sum() / sizes.sum(), gap * enough.any()]
    line(f"threshold {threshold}", seen)
    assert np.allclose(seen, explained)
    assert threshold > 1 or np.allclose(seen, by_hand)
    assert threshold != 50 or seen[0] < seen[3]
PY
