#!/usr/bin/env bash
# reasoning-gym 0.1.25, Python 3.11: ReseedingDataset repeats a chunk with one new question each time
#
# Valid input: ReseedingDataset, with its default chunks of 500 questions, around a data set with a seed, to have as
# many questions as a training needs. And two data sets of the seeds 42 and 43, one to train, one to test.
#
# Expected: "infinite by reseeding", so that each chunk is of new questions, as are those of a data set of that size.
# A data set of another seed has other questions.
#
# Seen: question i is drawn with the seed plus i, and chunk c has the seed plus c. So question i of a chunk is question
# i - 1 of the next one, and a chunk brings one new question. The first 5000 have 509 different ones at most. For the
# same reason seeds 42 and 43 have all but one of 500 questions in common. There is no warning.
#
# Why it matters: a training with generated tasks is to see no task twice. This one sees the same 500 in each chunk, in
# the same order, and learns them by heart. A test set of the next seed consists of the questions of the training, so
# the score says that all is well. Take a data set of a large size, and seeds that are farther apart than that.
#
# Output (different questions of 5000; of 500 questions of seed 43 and of seed 1000042, those that seed 42 has as well):
#                          of 5000        of 500, in seed 42
#                     plain  reseeding     43   1000042
#   chain_sum            4863        505    499         2
#   basic_arithmetic     4979        509    499         0
#   bitwise_arithmetic   5000        509    499         0
#   sentence_reordering  4367        494    500        24
#   maze                 5000        509    499         0
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet reasoning-gym==0.1.25 || exit 2
"$work/venv/bin/python" - <<'PY'
import itertools
import warnings

import reasoning_gym
from reasoning_gym.dataset import ReseedingDataset

SIZE = 500
DRAWN = 5000
warnings.simplefilter("error")


def questions(name, seed, size):
    return [entry["question"] for entry in reasoning_gym.create_dataset(name, seed=seed, size=size)]


print("                       of 5000        of 500, in seed 42")
print("                  plain  reseeding     43   1000042")
for name in ("chain_sum", "basic_arithmetic", "bitwise_arithmetic", "sentence_reordering", "maze"):
    first = reasoning_gym.create_dataset(name, seed=42, size=SIZE)
    endless = [entry["question"] for entry in itertools.islice(ReseedingDataset(first), DRAWN)]
    plain = questions(name, 42, DRAWN)
    # Each chunk is the questions from another place on.
    for chunk in range(DRAWN // SIZE):
        assert endless[chunk * SIZE : (chunk + 1) * SIZE] == plain[chunk : chunk + SIZE], name
    assert questions(name, 43, SIZE)[:-1] == plain[1:SIZE], name
    known = set(plain[:SIZE])
    shared = [sum(question in known for question in questions(name, seed, SIZE)) for seed in (43, 1000042)]
    print(f"{name:20}{len(set(plain)):5}{len(set(endless)):11}{shared[0]:7}{shared[1]:10}")
    assert len(set(endless)) <= SIZE + DRAWN // SIZE - 1 < 0.2 * len(set(plain)), name
    assert shared[0] >= SIZE - 1 and shared[1] < 0.1 * SIZE, name
PY
