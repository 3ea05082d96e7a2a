#!/usr/bin/env bash
# ir_measures 0.4.3, Python 3.11: beside an nDCG with gains, the plain nDCG is sometimes the other one
#
# Valid input: graded relevances (3, 2, 1, 0), and two measures in one call of calc_aggregate: nDCG@10, and a strict one
# in which the lowest grade is no gain, nDCG(gains={1: 0})@5 or @10 (`gains` is a documented parameter of nDCG).
#
# Expected: each measure has the value that it has in a call of its own, in every process.
#
# Seen: in some processes nDCG@10 is the strict value, and a strict one of the same cutoff is then 0. The measures are
# kept in a set, whose order comes from Python's random hash of strings. The provider for pytrec_eval puts a plain nDCG
# into the first group of measures that it has; if that is the one with the mapped relevances, these count. With an
# equal cutoff both have one name in the group, so the strict one is lost, and what is missing gets the default 0.
#
# Why it matters: one script gives 0.525 in one process and 0.352 in the next, without a warning and both plausible, so
# two retrievers that are measured in two processes may be compared by two measures. With graded judgments both nDCGs
# are usual in one table. The 0.000 looks like a retriever that finds nothing. A call for each nDCG is safe.
#
# Output:
#   each alone          plain@10, strict@5, strict@10: 0.525  0.352  0.352
#   PYTHONHASHSEED=0    plain@10, strict@5: 0.352  0.352    plain@10, strict@10: 0.525  0.352
#   PYTHONHASHSEED=1    plain@10, strict@5: 0.352  0.352    plain@10, strict@10: 0.352  0.000
#   PYTHONHASHSEED=2    plain@10, strict@5: 0.352  0.352    plain@10, strict@10: 0.352  0.000
#   PYTHONHASHSEED=3    plain@10, strict@5: 0.352  0.352    plain@10, strict@10: 0.352  0.000
#   PYTHONHASHSEED=4    plain@10, strict@5: 0.525  0.352    plain@10, strict@10: 0.525  0.352
#   PYTHONHASHSEED=5    plain@10, strict@5: 0.352  0.352    plain@10, strict@10: 0.525  0.352
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet ir_measures==0.4.3 pytrec_eval-terrier==0.5.11 numpy==2.4.6 scipy==1.17.1 || exit 2
"$work/venv/bin/python" - <<'PY'
import json
import os
import subprocess
import sys

# Prints what one process measures: first each measure in a call of its own, then the plain one with each strict one.
PROCESS = """
import json
import ir_measures
from ir_measures import nDCG

qrels = {"question": {"a": 1, "b": 3, "c": 0, "d": 2}}
run = {"question": {"a": 4.0, "c": 3.0, "b": 2.0, "x": 1.0}}
plain, strict5, strict10 = nDCG @ 10, nDCG(gains={1: 0}) @ 5, nDCG(gains={1: 0}) @ 10


def values(*measures):
    found = ir_measures.calc_aggregate(list(measures), qrels, run)
    return [round(found[measure], 3) for measure in measures]


alone = values(plain) + values(strict5) + values(strict10)
print(json.dumps([alone, values(plain, strict5), values(plain, strict10)]))
"""


def process(seed: int) -> list[list[float]]:
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    return json.loads(subprocess.check_output([sys.executable, "-c", PROCESS], env=environment))


def shown(values: list[float]) -> str:
    return "  ".join(f"{value:.3f}" for value in values)


processes = [process(seed) for seed in range(6)]
alone = processes[0][0]
assert all(values[0] == alone for values in processes)
print(f"each alone          plain@10, strict@5, strict@10: {shown(alone)}")
for seed, (_, with5, with10) in enumerate(processes):
    print(f"PYTHONHASHSEED={seed}    plain@10, strict@5: {shown(with5)}    plain@10, strict@10: {shown(with10)}")
plain, strict5, strict10 = alone
assert plain > strict5 == strict10 > 0
assert {tuple(with5) for _, with5, _ in processes} == {(plain, strict5), (strict5, strict5)}
assert {tuple(with10) for _, _, with10 in processes} == {(plain, strict10), (strict10, 0.0)}
PY
