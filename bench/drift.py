"""Measures on the sample world whether RL harms a good cold start, with a KL budget and without one.

    python -m bench.drift                  # seeds 0, 1 and 2; some 25 minutes of one core
    python -m bench.drift --budget 0.002

For each seed, SFT on flawless trajectories of all training questions makes a cold start that answers about nine of ten
test questions. RL then takes about --episodes episodes with the settings in section [ppo] of a preset, once without and
once with --kl-budget. Its learning rate is the same share of SFT's learning rate as in the preset. Runs that are
finished under --work are not repeated. Results are added to bench/results/drift.json.

A budget passes under two conditions, both on means over the seeds: exact match falls by at most 0.01, and the KL
divergence from the cold start is from half of the budget to twice the budget. The lower bound is there because a run
that learns nothing must not pass. The KL is measured on episodes of the dev questions, sampled with the last adapter.
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
COLD_STEPS = 160  # optimizer steps of SFT that make the cold start
MOST_LOSS = 0.01  # largest loss of exact match at which a budget passes
KL_BOUNDS = (0.5, 2.0)  # smallest and largest mean KL at which a budget passes, as multiples of the budget
DEV = ["--batch-size", "100", "--num-generations", "2"]  # episodes that the KL at the end is measured with


def preset(name: str) -> dict:
    """Returns the settings of a preset."""
    return tomllib.loads(shipped("presets", f"{name}.toml").read_text(encoding="utf-8"))


def write_settings(path: Path, name: str, episodes: int) -> dict:
    """Writes the settings of RL and returns their section [ppo].

    They are the model settings of the preset tiny, and the section [ppo] of the preset `name`. Its learning rate is
    divided by the [sft] learning rate of that preset and multiplied by tiny's. Its max_steps gives about `episodes`
    episodes.
    """
    tiny = preset("tiny")
    rl_preset = preset(name)
    section = dict(rl_preset["ppo"])
    section["learning_rate"] *= tiny["sft"]["learning_rate"] / rl_preset["sft"]["learning_rate"]
    section["max_steps"] = math.ceil(episodes / (section["batch_size"] * section["num_generations"]))
    model = {key: value for key, value in tiny.items() if not isinstance(value, dict)}
    model_lines, section_lines = (
        [f"{key} = {json.dumps(value)}" for key, value in part.items()] for part in (model, section)
    )
    write_text(path, "\n".join([*model_lines, "[ppo]", *section_lines]) + "\n")
    return section


class Seed:
    """The runs of one seed, in the folder WORK/SEED. Index and trajectories are in WORK, for all seeds."""

    def __init__(self, work: Path, seed: int, settings: Path):
        self.folder = work / str(seed)
        self.tiny = ["--preset", "tiny", "--seed", str(seed)]
        self.search = ["--index", str(work / "index")]
        self.rl = ["--config", str(settings), "--seed", str(seed), "--adapter", str(self.folder / "sft"), *self.search]

    def begin(self, work: Path) -> None:
        """Makes the index, the trajectories and the cold start of this seed, if they are missing."""
        rows = work / "flawless.jsonl"
        if not (work / "index").exists():
            run("index", [*self.tiny, "--corpus", str(WORLD / "corpus.jsonl"), "--output", str(work / "index")])
        if not rows.exists():
            data = ["--data", str(WORLD / "train.jsonl"), *self.search]
            run("collect", [*self.tiny, *data, "--output", str(rows)])
        if not (self.folder / "sft" / run_files.SUMMARY).exists():
            steps = ["--max-steps", str(COLD_STEPS), "--resume", "auto"]
            run("sft", [*self.tiny, "--data", str(rows), *steps, "--output", str(self.folder / "sft")])

    def em(self, name: str) -> float:
        """Returns the exact match of the adapter of the run `name` on the test questions."""
        output = self.folder / f"{name}-scores"
        if not (output / run_files.SCORES).exists():
            data = ["--data", str(WORLD / "test.jsonl"), *self.search]
            adapter = ["--adapter", str(self.folder / name)]
            run("evaluate", [*self.tiny, *data, *adapter, "--output", str(output)])
        return json.loads((output / run_files.SCORES).read_text(encoding="utf-8"))["em"]["value"]

    def learn(self, name: str, flags: list[str]) -> dict:
        """Trains from the cold start by RL, if the run is not complete; returns a record of the run."""
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
        """Returns the KL divergence of the last adapter from the cold start, in nats per token, and its standard error.

        It is measured on new episodes of the dev questions; the standard error is over questions.
        """
        flags = [*self.rl, *DEV, "--kl-beta", "0.001", "--data", str(WORLD / "dev.jsonl")]
        config = resolve("ppo", PpoConfig(), flags)
        questions = read_questions_of(config.data, config.mixture)
        retrieve = build_retriever(Setup(config.retrieval, questions, config.common.seed))
        engine, learner, state = rl_setup.build_learning(config, questions)
        state.go_back(checkpoint.read(output / f"checkpoint-{max(checkpoint.folders_by_step(output))}"))
        sampled = RoundSampler(config, questions, engine, retrieve, None).sample(1, Stopwatch())
        batch = Batch.of(sampled.rollouts())
        # The log-probabilities of both models come from the same pass of the learner, so that rounding adds
        # nothing to the KL. Those of the engine would differ by rounding.
        batch = batch.with_trainer_logprobs(learner.policy_logprobs(batch))
        return kl_on_policy(replace(batch, reference=learner.reference_logprobs(batch)))


def summary(runs: list[dict], name: str, budget: float) -> str:
    """Returns one line on the runs `name` of all seeds: their scores, and whether they pass for a KL budget."""
    losses = [run["cold_em"] - run[name]["em"] for run in runs]
    kls = [run[name]["kl"] for run in runs]
    loss = statistics.fmean(losses)
    kl = statistics.fmean(kls)
    lowest, highest = KL_BOUNDS
    inside = lowest * budget <= kl <= highest * budget
    verdict = f"{'passes' if loss <= MOST_LOSS and inside else 'does not pass'} for a budget of {budget:g}"
    by_seed = ", ".join(f"{run['cold_em']:.3f} -> {run[name]['em']:.3f} (KL {run[name]['kl']:.2g})" for run in runs)
    return f"{name}: EM {by_seed}; mean loss {loss:+.4f}, mean KL {kl:.2g}: {verdict}"


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
    work = flags.work / f"{flags.preset}-{flags.episodes}"  # runs of other settings are others
    work.mkdir(parents=True, exist_ok=True)
    settings = work / "settings.toml"
    section = write_settings(settings, flags.preset, flags.episodes)
    runs = []
    for seed in flags.seeds:
        world = Seed(work, seed, settings)
        world.begin(work)
        about = {"section": "drift", "seed": seed, "preset": flags.preset, "budget": flags.budget, "ppo": section}
        measured = {
            "cold_em": round(world.em("sft"), 4),
            "plain": world.learn("plain", []),
            "budgeted": world.learn(f"budgeted-{flags.budget:g}", ["--kl-budget", str(flags.budget)]),
        }
        date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        runs.append(about | conditions | {"date": date} | measured)
        records.add(flags.results / "drift.json", runs[-1])
    for name in ("plain", "budgeted"):
        print(summary(runs, name, flags.budget))


if __name__ == "__main__":
    main()
