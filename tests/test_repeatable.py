"""The same command twice gives the same bits, in processes whose hash seeds differ, with one thread and with two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.stress.fault_cases import ALGORITHM_FLAGS, CASES_BY_NAME
from r3lite.rl.algorithms import ALGORITHMS

ROOT = Path(__file__).parent.parent
FAST = ["sft", "ppo, grpo", "collect, gold", "index, build", "index, add", "export, folder", "prepare", "report"]
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the bench forks")


def file_digests(work: Path, threads: int, seed: int, cases: list[str]) -> dict[str, dict[str, str]]:
    command = [sys.executable, "-m", "bench.stress.repeated", "--work", str(work), "--threads", str(threads), *cases]
    env = os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("threads", "cases"),
    [
        (1, FAST),
        pytest.param(2, FAST, marks=pytest.mark.slow),
        pytest.param(1, [name for name in CASES_BY_NAME if "spans" not in name], marks=pytest.mark.slow),
        pytest.param(2, [name for name in CASES_BY_NAME if "spans" not in name], marks=pytest.mark.slow),
    ],
    ids=["1 thread", "2 threads", "1 thread, all", "2 threads, all"],
)
def test_twice_is_the_same_to_the_bit(tmp_path, threads, cases):
    first_run, second_run = (file_digests(tmp_path, threads, seed, cases) for seed in (1, 2))
    assert first_run == second_run and all(first_run.values())


def test_the_bench_of_faults_kills_every_algorithm():
    assert set(ALGORITHM_FLAGS) == set(ALGORITHMS)
