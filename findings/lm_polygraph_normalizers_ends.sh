#!/usr/bin/env bash
# lm-polygraph 0.7.0, Python 3.11: its normalizers give the surest answers the confidence of quite other ones
#
# Valid input: 1000 uncertainties, 100 answers each of 0.1, 0.2, ... 1.0, and whether the answer was right; fewer are
# right where the uncertainty is higher. BinnedPCCNormalizer (5 bins) and IsotonicPCCNormalizer are fitted to them, as
# `polygraph_normalize` does. Then they turn the same uncertainties, and one below and one above them, into confidences.
#
# Expected: the binned one gives the mean of the bin an uncertainty was counted in at `fit`; it falls as the uncertainty
# rises. The isotonic one, made with out_of_bounds="clip", gives at most what is right at the lowest uncertainty, and
# beyond the ends the value of the nearer end. IsotonicRegression of scikit-learn, with the same options, does that.
#
# Seen: an uncertainty at or below the lowest of `fit` gets the last bin, that of the least sure answers: `transform`
# takes the bin before the first edge that is not below, and before the first edge that is number -1. (Any other value
# at an edge gets the bin below its own.) Beyond the ends the isotonic one gives the values of two points that happen to
# be first and last in a Python set; cir-model, where the class comes from, fits these points again and clips. So an
# uncertainty of 1.2 is twice as trustworthy here as one of 0.05. There is no warning.
#
# Why it matters: many uncertainties have a lowest value that is the commonest one: no two samples differ, one semantic
# set, a share of 0. These answers, the best there are, are dropped by any threshold of confidence. And on questions
# that are easier or harder than those of the calibration, many uncertainties lie outside of its range.
#
# Output (uncertainty; part that was right; mean of its bin; BinnedPCC; IsotonicPCC; IsotonicRegression):
#   0.05      -   0.93   0.13   0.40   0.96
#   0.10   0.96   0.93   0.13   0.96   0.96
#   0.20   0.90   0.93   0.93   0.90   0.90
#   0.30   0.80   0.75   0.93   0.80   0.80
#   0.40   0.70   0.75   0.75   0.70   0.70
#   0.50   0.60   0.55   0.75   0.60   0.60
#   0.60   0.50   0.55   0.55   0.50   0.50
#   0.70   0.40   0.35   0.55   0.40   0.40
#   0.80   0.30   0.35   0.35   0.30   0.30
#   0.90   0.20   0.13   0.35   0.20   0.20
#   1.00   0.06   0.13   0.13   0.06   0.06
#   1.20      -   0.13   0.13   0.80   0.06
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet numpy==2.4.6 scipy==1.17.1 scikit-learn==1.9.1 || exit 2
# Without its other dependencies: they are for models, data sets and a web page.
"$work/venv/bin/pip" install --quiet --no-deps lm-polygraph==0.7.0 || exit 2
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'PY'
import importlib.util
import sys
import types
import warnings

import numpy as np
from sklearn.isotonic import IsotonicRegression

# The modules of the normalizers are loaded without those of the whole package, which need its other dependencies.
(root,) = importlib.util.find_spec("lm_polygraph").submodule_search_locations
for name, folder in (("lm_polygraph", root), ("lm_polygraph.utils", f"{root}/utils")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from lm_polygraph.normalizers.binned_pcc import BinnedPCCNormalizer
from lm_polygraph.normalizers.isotonic_pcc import IsotonicPCCNormalizer

ANSWERS = 100  # of each uncertainty
BINS = 5
warnings.simplefilter("error")
values = np.arange(1, 11) / 10
counts = np.array([96, 90, 80, 70, 60, 50, 40, 30, 20, 6])
uncertainties = np.repeat(values, ANSWERS)
right = np.concatenate([np.arange(ANSWERS) < count for count in counts]).astype(float)
new = np.concatenate([[0.05], values, [1.2]])

binned = BinnedPCCNormalizer()
binned.fit(right, uncertainties, BINS)
isotonic = IsotonicPCCNormalizer()
isotonic.fit(right, uncertainties)
plain = IsotonicRegression(out_of_bounds="clip", increasing=False, y_min=0, y_max=1).fit(uncertainties, right)

# Two uncertainties are in each bin, and the means of the bins are those of `fit`.
means = counts.reshape(BINS, 2).mean(axis=1) / ANSWERS
assert np.allclose(binned.params["binned_metric"], means)
assert np.allclose(binned.params["bin_edges"], [0.1, 0.3, 0.5, 0.7, 0.9, 1.0])
hand = np.concatenate([means[:1], np.repeat(means, 2), means[-1:]])
part = np.concatenate([[np.nan], counts / ANSWERS, [np.nan]])
columns = (part, hand, binned.transform(new), isotonic.transform(new), plain.predict(new))
for row in zip(new, *columns):
    print("  ".join(f"{value:5.2f}" if value == value else "    -" for value in row))
by_bins, by_isotonic, by_plain = columns[2:]

assert np.allclose(by_bins[:2], means[-1])  # The surest answers get the last bin.
assert np.allclose(by_bins[[3, 5, 7, 9]], means[:-1])  # At an edge: the bin below.
assert np.allclose(by_bins[[2, 4, 6, 8, 10, 11]], means[[0, 1, 2, 3, 4, 4]])
assert np.allclose(by_plain, part[[1, *range(1, 11), 10]])
assert np.allclose(by_isotonic[1:-1], part[1:-1])
assert by_plain[0] - by_isotonic[0] > 0.5 and by_isotonic[-1] - by_plain[-1] > 0.5
PY
