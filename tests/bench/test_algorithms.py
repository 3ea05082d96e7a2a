"""The comparison of algorithms: which runs are done, and what the page says of them."""

import json
from pathlib import Path

import pytest

from bench import algorithms, algorithms_page


def a_run(name: str, seed: int, right: str, budget: int = 100) -> dict:
    """A run that answered the questions as `right` says, after an SFT that answered none."""

    def scores(each: str) -> dict:
        share = each.count("1") / len(each)
        named = {"em": share, "f1": share, "format_adherence": 1.0, "retrieval_recall": 0.5, "mean_searches": 2.0}
        return named | {"each_em": each, "each_f1": [float(x) for x in each]}

    rl_results = {"tokens": budget, "rounds": 2, "minutes": 1.0} | scores(right)
    about = {"section": name, "seed": seed, "budget": budget, "flags": f"--algorithm {name}", "precision": "fp32"}
    about |= {"commit": "abc", "processor": "chip", "threads": 1}
    return about | {"sft": scores("0" * len(right)), "rl": rl_results}


HALF, MOST, FEW = "01" * 50, "0111" * 25, "0001" * 25


def test_gains_are_paired_over_the_questions_of_all_seeds():
    runs = [a_run("ppo", 0, HALF), a_run("ppo", 1, FEW), a_run("grpo", 0, MOST), a_run("grpo", 1, FEW)]
    page = algorithms_page.page(runs)
    row = next(line for line in page.splitlines() if line.startswith("| `grpo` | 0.750 / 0.250 | 0.500"))
    # Of 200 questions 100 are right instead of 0 of SFT, and 25 more than PPO's.
    assert "+0.500 (" in row and "+0.125 (" in row


def test_a_gain_over_sft_is_over_the_sft_of_the_run_itself():
    """A run on another processor begins from other weights: its SFT took the place of that of all runs of the seed."""
    later_run = a_run("dpo", 0, MOST)
    later_run["sft"] = a_run("any", 0, HALF)["rl"]
    page = algorithms_page.page([a_run("ppo", 0, HALF), later_run])
    sft, ppo, dpo = [line for line in page.splitlines() if line.startswith("|")][2:5]
    assert "| SFT only | 0.000 |" in sft
    assert "+0.500 (" in ppo and dpo.count("+0.250 (") == 3  # over SFT, EM over PPO and F1 over PPO


def test_seeds_that_answer_alike_do_not_narrow_the_interval():
    """The same 100 answers three times are 100 questions, not 300: resampled apart, they seemed to know more."""
    once, thrice = (
        algorithms_page.difference(*({s: a_run("x", s, right)["rl"] for s in range(n)} for right in (MOST, HALF)))
        for n in (1, 3)
    )
    assert once == thrice
    assert 2 * 1.9 * (0.25 * 0.75 / 100) ** 0.5 < once[2] - once[1] < 2 * 2.1 * (0.25 * 0.75 / 100) ** 0.5


@pytest.mark.parametrize(
    ("second", "sentence"),
    [(MOST, "higher than PPO's beyond the interval, and with every seed of at least two: `grpo`."),
     (HALF, "higher than PPO's beyond the interval, and with every seed of at least two: none.")],
)  # fmt: skip
def test_an_algorithm_that_is_better_with_one_seed_alone_is_not_called_better(second, sentence):
    runs = [a_run("ppo", 0, HALF), a_run("ppo", 1, HALF), a_run("grpo", 0, MOST), a_run("grpo", 1, second)]
    assert sentence in algorithms_page.page(runs)


def test_only_runs_of_one_budget_and_precision_are_compared():
    runs = [a_run("ppo", 0, HALF), a_run("grpo", 0, MOST, budget=200)]
    page = algorithms_page.page(runs)
    assert "## 100 generated tokens, fp32" in page and "## 200 generated tokens, fp32" in page
    assert "over PPO" not in page


class StandIn:
    """Stands in for the commands: each round generates 40 tokens."""

    def __init__(self, monkeypatch):
        self.ran: list[tuple[str, list[str]]] = []
        monkeypatch.setattr(algorithms, "run", self.run)

    def run(self, command: str, arguments: list[str]) -> None:
        self.ran.append((command, arguments))
        output = Path(arguments[arguments.index("--output") + 1])
        if command == "ppo":
            rounds = int(arguments[arguments.index("--stop-after") + 1])
            output.mkdir(parents=True, exist_ok=True)
            with (output / "metrics.jsonl").open("a") as file:
                if not file.tell():  # a validation before the first round has no tokens and no time
                    file.write('{"step": 0, "eval/em": 0.5}\n')
                file.write(rounds * (json.dumps({"step": 1, "completions/total_tokens": 40, "step_time": 6.0}) + "\n"))
        if command == "evaluate":
            output.mkdir(parents=True)
            names = ("em", "f1", "format_adherence", "retrieval_recall", "mean_searches")
            (output / "scores.json").write_text(json.dumps({name: {"value": 0.5} for name in names}))
            (output / "predictions.jsonl").write_text('{"em": 1.0, "f1": 1.0}\n{"em": 0.0, "f1": 0.5}\n')


@pytest.mark.parametrize(("budget", "rounds"), [(350, 9), (330, 8), (40, 1)])
def test_a_run_ends_with_the_round_nearest_to_the_budget_and_is_not_done_twice(tmp_path, monkeypatch, budget, rounds):
    stand_in = StandIn(monkeypatch)
    seed = algorithms.Seed(tmp_path, 0, "fp32")
    run = seed.learn("grpo", ["--algorithm", "grpo"], budget)
    assert (run["rounds"], run["tokens"]) == (rounds, 40 * rounds)
    assert run["minutes"] == pytest.approx(0.1 * rounds) and run["each_em"] == "10"
    evaluated = stand_in.ran[-1][1]
    assert evaluated[evaluated.index("--adapter") + 1].endswith(f"grpo-{budget}/checkpoint-{rounds}/adapter")
    done = len(stand_in.ran)
    assert seed.learn("grpo", ["--algorithm", "grpo"], budget) == run and len(stand_in.ran) == done


@pytest.mark.parametrize(
    ("flags", "commands", "guide_flags"),
    [
        ("--algorithm grpo", [], []),
        ("--kl-beta 0.1", [], []),  # ppo, by default
        ("--algorithm luffy", ["collect"], ["--traces"]),
        ("--algorithm dgpo", ["collect", "sft"], ["--teacher", "--teacher-adapter", "--teacher-quantize"]),
    ],
)
def test_an_algorithm_gets_the_traces_or_the_teacher_that_it_needs(tmp_path, monkeypatch, flags, commands, guide_flags):
    stand_in = StandIn(monkeypatch)
    arguments = algorithms.Seed(tmp_path, 0, "fp32").guides(flags.split())
    assert [command for command, _ in stand_in.ran] == commands and arguments[::2] == guide_flags


def test_a_run_of_other_flags_is_another_run():
    run = a_run("grpo", 0, HALF)
    assert algorithms.same_run(run, run | {"commit": "later", "date": "later"})
    for key in ("seed", "budget", "flags", "precision", "section"):
        assert not algorithms.same_run(run, run | {key: "other"})
