#!/usr/bin/env bash
# litdata 0.2.76, Python 3.11: batches of one dataset each (batching_method="per_stream") leave out the weights
#
# Valid input: CombinedStreamingDataset of two or three datasets with weights, read by StreamingDataLoader in batches of
# 10. Each sample is the number of its dataset.
#
# Expected: "stratified" mixes within a batch, "per_stream" takes a batch from one randomly selected dataset. The weights
# are "the sampling ratio for the datasets", for both: with 0.9 and 0.1, nine of ten batches are of the first one.
#
# Seen: after a batch, "per_stream" draws until it gets a dataset other than the last. So two datasets take strict turns,
# half of the batches each, whatever the weights are. Of three, no one can get more than half. If weights are not given,
# they are the lengths of the datasets, and the small one is to last for the whole epoch; it is used up after a fifth of
# it, and all the rest is of the large one. There is no warning.
#
# Why it matters: mixtures for training, 90 % of new questions and 10 % of old text, become 50 % and 50 %. Nothing tells,
# as each batch by itself is right. Without weights, the end of an epoch has nothing of the small datasets any more.
#
# Output (share of the samples of each dataset, until one is used up; the datasets of the first twelve batches, * for
# several in one. "By hand" is a draw by the weights for each batch. Then, for datasets of 900 and 100 samples without
# weights: the last of the 100 batches that has any of the 100 samples):
#   0.9 0.1
#     drawn by hand   0.89  0.12   0 0 0 0 0 0 0 0 0 0 1 0
#     stratified      0.89  0.11   0 * * 0 * * * * * * 0 *
#     per_stream      0.50  0.50   0 1 0 1 0 1 0 1 0 1 0 1
#   0.99 0.01
#     drawn by hand   0.99  0.01   0 0 0 0 0 0 0 0 0 0 0 0
#     stratified      0.99  0.01   0 0 0 0 0 0 0 0 0 * 0 0
#     per_stream      0.50  0.50   0 1 0 1 0 1 0 1 0 1 0 1
#   0.9 0.08 0.02
#     drawn by hand   0.89  0.10  0.02   0 0 0 0 0 0 0 0 0 0 1 0
#     stratified      0.89  0.09  0.02   0 * * 0 * * * * * * 0 *
#     per_stream      0.49  0.41  0.11   0 1 0 1 2 0 1 0 1 0 1 0
#   no weights, stratified    98
#   no weights, per_stream    20
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 boto3==1.44.8 filelock==4.3.1 \
  lightning-utilities==0.15.3 obstore==0.12.1 requests==2.34.2 tifffile==2026.3.3 || exit 2
# Without torchvision, which it only needs for pictures.
"$work/venv/bin/pip" install --quiet --no-deps litdata==0.2.76 || exit 2
cat > "$work/mix.py" <<'PY'
import os
import random
import sys
import warnings
from collections import Counter

import litdata
from litdata.streaming import Cache

BATCH = 10


def write(number, length):
    folder = os.path.join(sys.argv[1], f"{number}-{length}")
    cache = Cache(folder, chunk_size=100)
    for index in range(length):
        cache[index] = number
    cache.done()
    cache.merge()
    return folder


def batches(folders, method, **options):
    parts = [litdata.StreamingDataset(folder) for folder in folders]
    combined = litdata.CombinedStreamingDataset(parts, batching_method=method, **options)
    return [batch.tolist() for batch in litdata.StreamingDataLoader(combined, batch_size=BATCH)]


def shares(batch_list, number):
    counts = Counter(sample for batch in batch_list for sample in batch)
    return [counts[index] / sum(counts.values()) for index in range(number)]


def main():
    warnings.simplefilter("error")
    folders = [write(number, 2000) for number in range(3)]
    for weights, seen in (
        ([0.9, 0.1], [0.5, 0.5]),
        ([0.99, 0.01], [0.5, 0.5]),
        ([0.9, 0.08, 0.02], [0.5, 0.4, 0.1]),
    ):
        rng = random.Random(0)
        drawn = [[rng.choices(range(len(weights)), weights=weights)[0]] * BATCH for _ in range(200)]
        options = {"weights": weights, "iterate_over_all": False, "seed": 0}
        print(*weights)
        for label, batch_list in (
            ("drawn by hand", drawn),
            ("stratified", batches(folders[: len(weights)], "stratified", **options)),
            ("per_stream", batches(folders[: len(weights)], "per_stream", **options)),
        ):
            part = shares(batch_list, len(weights))
            first = [str(batch[0]) if len(set(batch)) == 1 else "*" for batch in batch_list[:12]]
            print(f"  {label:14}" + "".join(f"{value:6.2f}" for value in part) + "   " + " ".join(first))
            right = seen if label == "per_stream" else weights
            assert all(abs(value - other) < 0.05 for value, other in zip(part, right)), (label, part)
        full = [batch for batch in batch_list if len(batch) == BATCH]
        assert all(len(set(batch)) == 1 for batch in full)
        assert all(batch[0] != after[0] for batch, after in zip(full, full[1:]))

    folders = [write(0, 900), write(1, 100)]
    for method in ("stratified", "per_stream"):
        batch_list = batches(folders, method, seed=0)
        last = max(index for index, batch in enumerate(batch_list) if 1 in batch) + 1
        assert sorted(sum(batch_list, [])) == [0] * 900 + [1] * 100
        print(f"no weights, {method:12}{last:4}")
        assert last == 20 if method == "per_stream" else last > 80


if __name__ == "__main__":
    main()
PY
OMP_NUM_THREADS=1 HOME="$work" "$work/venv/bin/python" "$work/mix.py" "$work/data"
