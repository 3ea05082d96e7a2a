#!/usr/bin/env bash
# netcal 1.4.0, Python 3.11: HistogramBinning looks a confidence at the edge of a bin up in the bin below
#
# Valid input: the share of sampled answers that agree, a usual confidence of a language model, and whether the answer
# was right. Five samples with the default of 10 bins, and eight samples with 8 bins; 100 answers of each share.
#
# Expected: after `fit`, `transform` of a share gives the part of right answers in its bin. No two of these shares are
# in one bin, so that part is that of the answers with this share. netcal's own IsotonicRegression gives just that.
#
# Seen: `fit` puts a value at an edge into the bin above it, `transform` reads the bin below. With 8 bins each share
# gets the part of the next lower share. With 10 bins the bin below is empty; an empty bin has its middle for a value,
# so the result does not depend on the labels at all. A millionth more than the edge, and the result is right. (With 10
# bins 0.6 is right as it is, not with a millionth more: that edge is 0.6000000000000001.) There is no warning.
#
# Why it matters: confidences from votes, or written by a model as 25 % or 75 %, lie at edges again and again. They are
# "calibrated" by the answers of another confidence, or by none. In the first table nothing is learned about a share of
# 0.4, right in 5 of 100 cases, and it stays at 0.35. BBQ is made of such models.
#
# Output (share; part that was right; by `transform`; the same for the share plus a millionth; by IsotonicRegression):
#   10 bins
#     0.200   0.02   0.15   0.02   0.02
#     0.400   0.05   0.35   0.05   0.05
#     0.600   0.10   0.10   0.65   0.10
#     0.800   0.40   0.75   0.40   0.40
#     1.000   0.60   0.60   0.60   0.60
#     mean gap to the part that was right: 0.37 before, 0.16 after
#   8 bins
#     0.125   0.02   0.06   0.02   0.02
#     0.250   0.05   0.02   0.05   0.05
#     0.375   0.10   0.05   0.10   0.10
#     0.500   0.20   0.10   0.20   0.20
#     0.625   0.30   0.20   0.30   0.30
#     0.750   0.40   0.30   0.40   0.40
#     0.875   0.60   0.40   0.60   0.60
#     mean gap to the part that was right: 0.26 before, 0.09 after
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
from netcal.binning import HistogramBinning, IsotonicRegression

ANSWERS = 100  # of each share
warnings.simplefilter("error")


def table(shares, bins, right_answers):
    confidences = np.repeat(shares, ANSWERS)
    labels = np.concatenate([np.arange(ANSWERS) < count for count in right_answers]).astype(int)
    accuracies = np.array(right_answers) / ANSWERS
    # Each share has a bin of its own, whichever of two bins an edge belongs to.
    edges = np.linspace(0, 1, bins + 1)[1:-1]
    assert len(set(np.digitize(shares, edges))) == len(set(np.digitize(shares, edges, right=True))) == len(shares)
    histogram = HistogramBinning(bins=bins).fit(confidences, labels)
    calibrated = histogram.transform(shares)
    above = histogram.transform(shares + 1e-6)
    isotonic = IsotonicRegression().fit(confidences, labels).transform(shares)
    print(f"{bins} bins")
    for row in zip(shares, accuracies, calibrated, above, isotonic):
        print(f"  {row[0]:.3f}" + "".join(f"{value:7.2f}" for value in row[1:]))
    before = np.abs(shares - accuracies).mean()
    after = np.abs(calibrated - accuracies).mean()
    print(f"  mean gap to the part that was right: {before:.2f} before, {after:.2f} after")
    assert np.allclose(isotonic, accuracies, atol=1e-6)
    return accuracies, calibrated, above


shares = np.arange(1, 6) / 5
accuracies, calibrated, above = table(shares, 10, [2, 5, 10, 40, 60])
at_edges = [0, 1, 3]
assert np.allclose(calibrated[at_edges], shares[at_edges] - 0.05)  # The middle of the empty bin below.
assert np.allclose(above[at_edges], accuracies[at_edges])
assert np.allclose(calibrated[[2, 4]], accuracies[[2, 4]])

shares = np.arange(1, 8) / 8  # Without 8 of 8: that share has the last bin in common with 7 of 8.
accuracies, calibrated, above = table(shares, 8, [2, 5, 10, 20, 30, 40, 60])
assert np.allclose(calibrated[1:], accuracies[:-1])
assert np.allclose(above, accuracies)
PY
