"""Whether RL harms a good cold start: with a KL budget and without, on the sample world.

    python -m bench.drift                  # seeds 0, 1 and 2; some 25 minutes of one core
    python -m bench.drift --budget 0.002

For each seed, SFT on flawless trajectories of all training questions makes a cold start that answers about nine of ten
test questions. Reinforcement with the section [ppo] of a preset follows for about --episodes episodes, at the same
share of SFT's learning rate as there: once as it is and once with --kl-budget. What is finished under --work is not
done again. Runs are added to bench/results/drift.json.

A budget passes if exact match falls by at most 0.01 in the mean over the seeds while the KL divergence from the cold
start is inside it: from half of it to twice as much in the mean, so that standing still does not pass. The KL is that
of episodes of the dev questions, sampled with the last adapter.
"""

import argparse
import json
import math
import statistics
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import torch

from bench import records
from bench.algorithms import run
from bench.options import RESULTS
from r3lite.assembly import rl_setup
from r3lite.assembly.rl_round import RoundSampler
from r3lite.core import run_files
from r3lite.core.files import shipped, write_text
from r3lite.core.invocation import resolve
from r3lite.core.spans import Stopwatch
from r3lite.datasets.sources import read_questions_of
from r3lite.devices.precision import Precision, resolve_dtype
from r3lite.retrieval.retriever import build_retriever
from r3lite.retrieval.setup import Setup
from r3lite.rl.batch import Batch
from r3lite.rl.learner import kl_on_policy
from r3lite.settings import PpoConfig
from r3lite.training import checkpoint

WORLD = shipped("data", "world")
COLD_STEPS = 160  # of SFT
MOST_LOSS = 0.01  # of exact match
INSIDE = (0.5, 2.0)  # times the budget
DEV = ["--batch-size", "100", "--num-generations", "2"]  # episodes for the KL at the end


def preset(name: str) -> dict:
    return tomllib.loads(shipped("presets", f"{name}.toml").read_text(encoding="utf-8"))


def write_settings(path: Path, name: str, episodes: int) -> dict:
    """Writes the settings of RL, the tiny model with the section [ppo] of another preset, and returns that section."""
    tiny = preset("tiny")
    other = preset(name)
    section = dict(other["ppo"])
    section["learning_rate"] *= tiny["sft"]["learning_rate"] / other["sft"]["learning_rate"]
    section["max_steps"] = math.ceil(episodes / (section["batch_size"] * section["num_generations"]))
    model = {key: value for key, value in tiny.items() if not isinstance(value, dict)}
    parts = [[f"{key} = {json.dumps(value)}" for key, value in part.items()] for part in (model, section)]
    write_text(path, "\n".join([*parts[0], "[ppo]", *parts[1]]) + "\n")
    return section


class Seed:
    """The runs of one seed, under one folder."""

    def __init__(self, work: Path, seed: int, settings: Path):
        self.folder = work / str(seed)
        self.tiny = ["--preset", "tiny", "--seed", str(seed)]
        self.search = ["--index", str(work / "index")]
        self.rl = ["--config", str(settings), "--seed", str(seed), "--adapter", str(self.folder / "sft"), *self.search]

    def begin(self, work: Path) -> None:
        """Makes the cold start, unless it is there; index and trajectories are the same for all seeds."""
        rows = work / "flawless.jsonl"
        if not (work / "index").exists():
            run("index", [*self.tiny, "--corpus", str(WORLD / "corpus.jsonl"), "--output", str(work / "index")])
        if not rows.exists():
            data = ["--data", str(WORLD / "train.jsonl"), *self.search]
            run("collect", [*self.tiny, *data, "--output", str(rows)])
        if not (self.folder / "sft" / run_files.SUMMARY).exists():
            more = ["--max-steps", str(COLD_STEPS), "--resume", "auto"]
            run("sft", [*self.tiny, "--data", str(rows), *more, "--output", str(self.folder / "sft")])

    def em(self, name: str) -> float:
        """Exact match of the run `name` on the test questions."""
        output = self.folder / f"{name}-scores"
        if not (output / run_files.SCORES).exists():
            data = ["--data", str(WORLD / "test.jsonl"), *self.search]
            adapter = ["--adapter", str(self.folder / name)]
            run("evaluate", [*self.tiny, *data, *adapter, "--output", str(output)])
        return json.loads((output / run_files.SCORES).read_text(encoding="utf-8"))["em"]["value"]

    def learn(self, name: str, flags: list[str]) -> dict:
        """A run of RL, and what became of the cold start."""
        output = self.folder / name
        if not (output / run_files.SUMMARY).exists():
            data = ["--data", str(WORLD / "train.jsonl"), "--resume", "auto", "--output", str(output)]
            run("ppo", [*self.rl, *data, *flags])
        kl, error = self.last_kl(output)
        rounds = [json.loads(line) for line in (output / run_files.METRICS).read_text(encoding="utf-8").splitlines()]
        third = max(1, len(rounds) // 3)
        return {
            "em": round(self.em(name), 4),
            "kl": float(f"{kl:.3g}"),
            "kl_error": float(f"{error:.2g}"),
            "reward_first_third": round(statistics.fmean(r["reward"] for r in rounds[:third]), 4),
            "reward_last_third": round(statistics.fmean(r["reward"] for r in rounds[-third:]), 4),
            "taken_back": sum(r.get("kl_budget/taken_back", 0) for r in rounds),
            "minutes": round(sum(r["step_time"] for r in rounds) / 60, 2),
        }

    def last_kl(self, output: Path) -> tuple[float, float]:
        """KL from the cold start per token after the last round, and its standard error over questions."""
        flags = [*self.rl, *DEV, "--kl-beta", "0.001", "--data", str(WORLD / "dev.jsonl")]
        config = resolve("ppo", PpoConfig(), flags)
        questions = read_questions_of(config.data, config.mixture)
        retrieve = build_retriever(Setup(config.retrieval, questions, config.common.seed))
        engine, learner, state = rl_setup.build_learning(config, questions)
        state.go_back(checkpoint.read(output / f"checkpoint-{max(checkpoint.folders_by_step(output))}"))
        sampled = RoundSampler(config, questions, engine, retrieve, None).sample(1, Stopwatch())
        batch = Batch.of(sampled.rollouts())
        batch = batch.with_trainer_logprobs(
            learner.policy_logprobs(batch)
        )  # by the pass that the reference has: no rounding
        return kl_on_policy(replace(batch, reference=learner.reference_logprobs(batch)))


def summary(runs: list[dict], name: str, budget: float) -> str:
    """One line on the runs `name` of all seeds."""
    losses = [run["cold_em"] - run[name]["em"] for run in runs]
    kls = [run[name]["kl"] for run in runs]
    loss, kl = statistics.fmean(losses), statistics.fmean(kls)
    inside = INSIDE[0] * budget <= kl <= INSIDE[1] * budget
    verdict = f"{'passes' if loss <= MOST_LOSS and inside else 'does not pass'} for a budget of {budget:g}"
    each = ", ".join(f"{run['cold_em']:.3f} -> {run[name]['em']:.3f} (KL {run[name]['kl']:.2g})" for run in runs)
    return f"{name}: EM {each}; mean loss {loss:+.4f}, mean KL {kl:.2g}: {verdict}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--budget", type=float, default=0.001, help="nats per token at the end of a run")
    parser.add_argument("--preset", default="hotpotqa", help="whose section [ppo] is tried")
    parser.add_argument("--episodes", type=int, default=500)
    parser.add_argument("--work", type=Path, default=Path("runs/drift"), help="folder of the runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to which finished runs are added")
    flags = parser.parse_args()
    cpu = torch.device("cpu")
    conditions = records.provenance(Precision(resolve_dtype("auto", cpu), cpu))
    settings = flags.work / f"{flags.preset}.toml"
    settings.parent.mkdir(parents=True, exist_ok=True)
    section = write_settings(settings, flags.preset, flags.episodes)
    runs = []
    for seed in flags.seeds:
        world = Seed(flags.work, seed, settings)
        world.begin(flags.work)
        about = {"section": "drift", "seed": seed, "preset": flags.preset, "budget": flags.budget, "ppo": section}
        measured = {
            "cold_em": round(world.em("sft"), 4),
            "plain": world.learn("plain", []),
            "budgeted": world.learn(f"budgeted-{flags.budget:g}", ["--kl-budget", str(flags.budget)]),
        }
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        runs.append(about | conditions | {"date": now} | measured)
        records.add(flags.results / "drift.json", runs[-1])
    for name in ("plain", "budgeted"):
        print(summary(runs, name, flags.budget))


if __name__ == "__main__":
    main()
