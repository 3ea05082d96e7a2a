"""Several processes learn what one does: the same global batches, in fp32, of rows and episodes of unequal lengths.

Each of the mistakes that data parallelism invites makes the same comparison fail.
"""

import json

import pytest

from r3lite.core import run_files
from r3lite.core.files import shipped
from r3lite.training.metrics import read
from tests.ddp.conftest import differences, rl, sft

WEIGHTS, METRICS = 1e-6, 1e-5
RUNS = {
    "sft": (),
    "ppo": ("paid",),
    "grpo": ("paid",),
    "dapo": ("seldom_paid",),
}
MORE = {
    "dapo": ["--refill-limit", "3", "--kl-beta", "0", "--overlong-filter", "off"],
    "grpo": ["--old-logprobs", "trainer"],
}


def arguments(toy, output, name: str) -> tuple[str, list[str]]:
    """The command of a run, and its arguments."""
    return ("sft", sft(toy, output)) if name == "sft" else ("ppo", rl(toy, output, name, *MORE.get(name, [])))


@pytest.fixture(scope="module")
def alone(processes, toy, tmp_path_factory):
    """The folder of a run in one process, by its name."""
    folders = {}
    place = tmp_path_factory.mktemp("alone")

    def run(name: str):
        if name not in folders:
            assert processes(1).run(*arguments(toy, place / name, name), *RUNS[name]) == [0]
            folders[name] = place / name
        return folders[name]

    return run


def episodes(run) -> list[dict]:
    return [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", RUNS)
def test_processes_learn_what_one_learns(processes, alone, toy, tmp_path, name, size):
    """And they rehearse the largest pass, each its share."""
    together = processes(size)
    assert together.run(*arguments(toy, tmp_path / "run", name), *RUNS[name], "rehearsed") == [0] * size
    weights, metrics = differences(alone(name), tmp_path / "run")
    print(f"{name}, {size} processes: weights {weights:.2e}, metrics {metrics:.2e}")
    assert weights <= WEIGHTS and metrics <= METRICS
    assert [together.stderr_of(rank) for rank in range(1, size)] == [""] * (size - 1)  # the first alone says anything
    if name != "sft":
        assert episodes(alone(name)) == episodes(tmp_path / "run")
    if name == "dapo":
        assert max(record["refill/attempts"] for record in read(tmp_path / "run" / run_files.METRICS)) > 0


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("sft", "mean_of_local_means"),
        ("dapo", "count_of_local_tokens"),
        ("grpo", "seeds_of_ranks"),
        ("ppo", "critic_of_each_rank"),
        ("ppo", "whitened_on_each_rank"),
    ],
)
def test_the_comparison_shows_each_mistake(processes, alone, toy, tmp_path, name, mistake):
    assert processes(2).run(*arguments(toy, tmp_path / "run", name), *RUNS[name], mistake) == [0, 0]
    weights, metrics = differences(alone(name), tmp_path / "run")
    print(f"{mistake}: weights {weights:.2e}, metrics {metrics:.2e}")
    assert weights > 10 * WEIGHTS and metrics > 10 * METRICS


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "dapo"])
def test_with_retrieval_on_the_tiny_checkpoint(processes, cold, tmp_path, algorithm, size):
    from tests.cold_start import arguments

    flags = ["--dtype", "fp32", "--algorithm", algorithm, "--max-steps", "3", "--learning-rate", "1e-5"]
    flags += ["--refill-limit", "2"] if algorithm == "dapo" else ["--kl-beta", "0.05"]
    flags += ["--eval-data", str(shipped("data", "world", "test.jsonl")), "--eval-questions", "6", "--eval-every", "2"]
    for count in (1, size):
        run = arguments(cold, tmp_path / str(count), *flags)
        assert processes(count).run("ppo", run) == [0] * count
    weights, metrics = differences(tmp_path / "1", tmp_path / str(size))
    print(f"{algorithm}, {size} processes: weights {weights:.2e}, metrics {metrics:.2e}")
    assert weights <= WEIGHTS and metrics <= METRICS
    assert episodes(tmp_path / "1") == episodes(tmp_path / str(size))
