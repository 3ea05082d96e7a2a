"""Several processes learn what one does: the same global batches, in fp32, of rows and episodes of unequal lengths.

Each of the mistakes that data parallelism invites makes the same comparison fail.
"""

import json

import pytest

from r3lite.core import run_files
from r3lite.core.files import shipped
from r3lite.training.metrics import read
from tests.cold_start import arguments as arguments_of_cold
from tests.ddp.conftest import differences, mean_differences, rl, sft

WEIGHTS, METRICS = 1e-6, 1e-5
MEAN_WEIGHTS, GRADIENTS = 2e-8, 1e-3  # of `mean_differences`: rounding gives 2e-9 and 4e-5, mistakes 7e-7 and 1
ROUNDING = "sampling/sampling_logp_difference/max"  # of the least likely tokens: up to 1e-4, and another in each run
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


@pytest.fixture(scope="module")
def with_retrieval(processes, cold, tmp_path_factory):
    """Runs RL on the tiny checkpoint, with retrieval; returns the run's folder. A run alone is started once."""
    place = tmp_path_factory.mktemp("with_retrieval")

    def run(algorithm: str, size: int = 1, *changes: str):
        output = place / "-".join([algorithm, str(size), *changes])
        if not output.exists():
            flags = ["--dtype", "fp32", "--algorithm", algorithm, "--max-steps", "3", "--learning-rate", "1e-5"]
            flags += ["--refill-limit", "2"] if algorithm == "dapo" else ["--kl-beta", "0.05"]
            flags += ["--eval-data", str(shipped("data", "world", "test.jsonl")), "--eval-questions", "6"]
            # Passes of other shapes round differently, which moves the borders between tokens in [0, 1), mostly by
            # 1e-9, and an episode changes where a border passes a uniform number: in about one run of a hundred. With
            # seed 0, ppo's did, at a token of probability 4e-9. With seed 5, its nearest border is 6e-6 off. Some
            # seeds, such as 1, pay nothing in the first round: all that PPO whitens then is rounding.
            flags += ["--eval-every", "2", "--seed", "5"]
            assert processes(size).run("ppo", arguments_of_cold(cold, output, *flags), *changes) == [0] * size
        return output

    return run


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "dapo"])
def test_with_retrieval_on_the_tiny_checkpoint(with_retrieval, algorithm, size):
    alone, together = with_retrieval(algorithm), with_retrieval(algorithm, size)
    assert episodes(alone) == episodes(together)
    assert all(record["reward_std"] > 0 for record in read(alone / run_files.METRICS) if "reward_std" in record)
    metrics = differences(alone, together, without=(ROUNDING,))[1]
    weights, gradients = mean_differences(alone, together)
    print(f"{algorithm}, {size} processes: weights {weights:.2e}, gradients {gradients:.2e}, metrics {metrics:.2e}")
    assert weights <= MEAN_WEIGHTS and gradients <= GRADIENTS and metrics <= METRICS
    for run in (alone, together):
        assert max(record.get(ROUNDING, 0.0) for record in read(run / run_files.METRICS)) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "mistake"),
    [
        ("dapo", "count_of_local_tokens"),
        ("grpo", "seeds_of_ranks"),
        ("ppo", "critic_of_each_rank"),
        ("ppo", "whitened_on_each_rank"),
    ],
)
def test_the_comparison_of_means_shows_each_mistake(with_retrieval, algorithm, mistake):
    weights, gradients = mean_differences(with_retrieval(algorithm), with_retrieval(algorithm, 2, mistake))
    print(f"{mistake}: weights {weights:.2e}, gradients {gradients:.2e}")
    assert weights > 10 * MEAN_WEIGHTS and gradients > 10 * GRADIENTS
