#!/usr/bin/env bash
# datasketch 2.0.0, Python 3.11: to tell bBitMinHash the ratio r of the sizes makes its similarities too small
#
# Valid input: sets of 1000 of 100000 possible word pairs, with known Jaccard similarities; bBitMinHash(minhash, b, r)
# with r=0.01, which is the expected ratio of the set size to the number of possible values, as the documentation asks.
#
# Expected: the unbiased estimate of Li and Koenig (2010), the paper that the documentation names. Equal last bits of
# different values are taken off with A = r (1 - r)^(2^b - 1) / (1 - (1 - r)^(2^b)).
#
# Seen: the last exponent is 2 * b in place of 2^b, which is the same for b=1 and b=2 only. With b=3 or more A is too
# great, for b=4 nearly twofold. Sets that have nothing in common get similarities below 0, and the true r gives worse
# estimates than r=0, "unknown". For a tiny r all comes close to r=0 by the paper; here it jumps.
#
# Why it matters: sketches of few bits are for collections with too many passages for whole ones: to find near doubles,
# or passages of the test data in the training data. Estimates below about 0.8 are too small for all pairs alike, so no
# average and no longer sketch helps, and a low threshold misses pairs. Leave r at 0 unless b is 1 or 2.
#
# Output:
#   mean of 8 estimates, true:      0.00   0.33   0.67   0.90
#   b=1  by the paper, r=0.01     -0.02   0.31   0.67   0.90
#   b=1  r=0.01                   -0.02   0.31   0.67   0.90
#   b=1  r=0                      -0.03   0.31   0.67   0.90
#   b=2  by the paper, r=0.01     -0.01   0.33   0.67   0.90
#   b=2  r=0.01                   -0.01   0.33   0.67   0.90
#   b=2  r=0                      -0.02   0.32   0.67   0.90
#   b=3  by the paper, r=0.01      0.01   0.33   0.67   0.90
#   b=3  r=0.01                   -0.04   0.30   0.66   0.90
#   b=3  r=0                       0.00   0.32   0.67   0.90
#   b=4  by the paper, r=0.01      0.01   0.33   0.67   0.90
#   b=4  r=0.01                   -0.05   0.29   0.65   0.90
#   b=4  r=0                       0.00   0.33   0.67   0.90
#   b=4  r=1e-6                   -0.07   0.28   0.65   0.89
#   b=6  by the paper, r=0.01      0.00   0.33   0.67   0.90
#   b=6  r=0.01                   -0.04   0.31   0.66   0.90
#   b=6  r=0                      -0.00   0.33   0.67   0.90
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet datasketch==2.0.0 scipy==1.17.1 numpy==2.4.6 || exit 2
"$work/venv/bin/python" - <<'PY'
import numpy as np
from datasketch import MinHash, bBitMinHash

POSSIBLE, SIZE, R = 100_000, 1000, 0.01
COMMON = {0: "0.00", 500: "0.33", 800: "0.67", 950: "0.90"}

random = np.random.default_rng(0)
pairs: dict[int, list[tuple[MinHash, MinHash]]] = {common: [] for common in COMMON}
for common in COMMON:
    for seed in range(1, 9):
        values = [str(number).encode() for number in random.choice(POSSIBLE, 2 * SIZE - common, replace=False)]
        one, other = MinHash(num_perm=512, seed=seed), MinHash(num_perm=512, seed=seed)
        one.update_batch(values[:SIZE])
        other.update_batch(values[SIZE - common :])
        pairs[common].append((one, other))


def by_the_paper(one: MinHash, other: MinHash, b: int, r: float) -> float:
    """With equal r of both sets, C1 = C2 = A."""
    equal = np.mean(one.hashvalues % 2**b == other.hashvalues % 2**b)
    chance = r * (1 - r) ** (2**b - 1) / (1 - (1 - r) ** (2**b))
    return (equal - chance) / (1 - chance)


def seen(one: MinHash, other: MinHash, b: int, r: float) -> float:
    return bBitMinHash(one, b, r).jaccard(bBitMinHash(other, b, r))


print("mean of 8 estimates, true:      " + "   ".join(COMMON.values()))
for b in (1, 2, 3, 4, 6):
    means = {}
    for label, estimate, r in (
        ("by the paper, r=0.01", by_the_paper, R),
        ("r=0.01", seen, R),
        ("r=0", seen, 0.0),
        ("r=1e-6", seen, 1e-6),
    ):
        means[label] = np.array([np.mean([estimate(*pair, b, r) for pair in pairs[common]]) for common in COMMON])
        if label != "r=1e-6" or b == 4:
            print(f"b={b}  {label:22} " + "".join(f"{mean:7.2f}" for mean in means[label]))
    wrong = means["r=0.01"] - means["by the paper, r=0.01"]
    true = np.array([common / (2 * SIZE - common) for common in COMMON])
    assert abs(means["by the paper, r=0.01"] - true).max() < 0.04
    assert abs(wrong).max() < 1e-9 if b < 3 else (wrong < 0).all() and wrong[0] < -0.03
PY
