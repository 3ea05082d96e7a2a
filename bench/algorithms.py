"""Compares the algorithms of reinforcement learning on the sample world, at equal numbers of generated tokens.

    python -m bench.algorithms                      # all algorithms, seeds 0, 1 and 2; hours of one core
    python -m bench.algorithms --only ppo grpo --seeds 0 --tokens 50000
    python -m bench.algorithms --only grpo-mild --variant "grpo-mild=--algorithm grpo --kl-beta 0.01"

For each seed, the quickstart's index, hasty trajectories and SFT adapter are made once. Hasty means that a share of the
trajectories, HURRIED, answers one hop too early. Each variant then starts from this adapter. It learns with a constant
rate after the warm-up, ends after a whole round at about --tokens generated tokens, and answers the test questions.
luffy and hybrid get flawless trajectories (none answers too early) of all training questions as traces, and verifree
gets them as contexts. dgpo gets a teacher: an adapter that learned from 300 of these trajectories. The same command
resumes after a kill: it skips the runs that are in the results and continues the unfinished one under --work. Finished
runs are added to bench/results/algorithms.json; none is replaced. bench/algorithms_page.py makes the page.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import torch

from bench import algorithms_page, records
from bench.options import RESULTS
from r3lite.assembly.stages import HURRIED, TRAJECTORIES
from r3lite.core import run_files
from r3lite.core.files import read_jsonl, shipped, write_text
from r3lite.devices.precision import Precision, resolve_dtype
from r3lite.rl.algorithms import ALGORITHMS

TOKENS = 100_000
MANY_ROUNDS = 1000  # --max-steps: more rounds than any token budget takes
WARMUP_ROUNDS = 1
STEP_SHARE = 0.6  # share of the estimated missing rounds that one start of ppo runs
VARIANTS = {name: ["--algorithm", name] for name in ALGORITHMS}


class Seed:
    """The runs of one seed, in the folder WORK/SEED."""

    def __init__(self, work: Path, seed: int, precision: str):
        self.folder = work / str(seed)
        self.seed = seed
        self.world = shipped("data", "world")
        self.common = ["--preset", "tiny", "--seed", str(seed)]
        self.shared = [*self.common, "--dtype", precision]
        self.search = ["--index", str(self.folder / "index")]

    def begin(self) -> None:
        """Makes the index, hasty trajectories and SFT adapter that all variants start from, if they are missing."""
        index = self.folder / "index"
        if not index.exists():
            run("index", [*self.common, "--corpus", str(self.world / "corpus.jsonl"), "--output", str(index)])
        hasty = self.collect("trajectories", ["--limit", str(TRAJECTORIES), "--hurried-share", str(HURRIED)])
        self.teach("sft", ["--data", str(hasty)])

    def collect(self, name: str, flags: list[str]) -> Path:
        """Returns the file of trajectories `name`; collects them from the training questions if the file is missing."""
        output = self.folder / f"{name}.jsonl"
        if not output.exists():
            data = ["--data", str(self.world / "train.jsonl"), *self.search]
            run("collect", [*self.common, *data, *flags, "--output", str(output)])
        return output

    def teach(self, name: str, flags: list[str]) -> Path:
        """Returns the output folder of the SFT run `name`; runs it if it is not complete."""
        output = self.folder / name
        if not (output / run_files.SUMMARY).exists():
            run("sft", [*self.shared, *flags, "--output", str(output), "--resume", "auto"])
        return output

    def guides(self, flags: list[str]) -> list[str]:
        """Returns the flags of the traces, contexts or teacher, if the algorithm of a variant's `flags` takes them."""
        name = flags[flags.index("--algorithm") + 1] if "--algorithm" in flags else "ppo"
        algorithm = ALGORITHMS[name]
        if algorithm.has_traces:
            return ["--traces", str(self.collect("flawless", []))]
        if algorithm.learns_right_answers:
            return ["--contexts", str(self.collect("flawless", []))]
        if algorithm.has_teacher:
            data = ["--data", str(self.collect("flawless", [])), "--limit", str(TRAJECTORIES)]
            adapter = str(self.teach("teacher", data))
            return ["--teacher", "tiny", "--teacher-adapter", adapter, "--teacher-quantize", "none"]
        return []

    def sft_scores(self) -> dict:
        """Returns the scores of the SFT adapter on the test questions."""
        return self.evaluate(self.folder / "sft" / "adapter", self.folder / "sft-scores")

    def evaluate(self, adapter: Path, output: Path) -> dict:
        """Returns the mean scores of an adapter on the test questions, and the exact match and F1 of each question."""
        if not (output / run_files.SCORES).exists():
            arguments = [*self.shared, "--data", str(self.world / "test.jsonl"), *self.search]
            run("evaluate", [*arguments, "--adapter", str(adapter), "--output", str(output)])
        scores = json.loads((output / run_files.SCORES).read_text(encoding="utf-8"))
        answers = [row.values for row in read_jsonl(output / run_files.PREDICTIONS)]
        metrics = ("em", "f1", "format_adherence", "retrieval_recall", "mean_searches")
        return {name: round(scores[name]["value"], 4) for name in metrics} | {
            "each_em": "".join(str(int(row["em"])) for row in answers),
            "each_f1": [round(row["f1"], 4) for row in answers],
        }

    def learn(self, name: str, flags: list[str], budget: int) -> dict:
        """Trains a variant until it has generated about `budget` tokens; returns the run's size and its scores."""
        output = self.folder / f"{name}-{budget}"  # a run with another budget starts anew, perhaps at a later commit
        arguments = [
            *self.shared,
            *flags,
            *self.guides(flags),
            "--adapter",
            str(self.folder / "sft"),
            *self.search,
            "--resume",
            "auto",
        ]
        arguments += ["--data", str(self.world / "train.jsonl"), "--output", str(output)]
        arguments += ["--learning-rate-schedule", "constant", "--max-steps", str(MANY_ROUNDS)]
        arguments += ["--warmup", str(WARMUP_ROUNDS / MANY_ROUNDS), "--keep-checkpoints", "1"]
        totals = generated_tokens(output)
        while budget - totals[-1] > _mean_per_round(totals) / 2:  # one more round comes nearer to the budget
            rounds = 1
            if mean := _mean_per_round(totals):
                # Fewer rounds than the estimate, because episodes become longer in training; at the end one by one.
                rounds = max(1, int(STEP_SHARE * (budget - totals[-1]) / mean))
            run("ppo", [*arguments, "--stop-after", str(rounds)])
            totals = generated_tokens(output)
        rows = [row.values for row in read_jsonl(output / run_files.METRICS)]
        size = {
            "tokens": totals[-1],
            "rounds": len(totals) - 1,
            "minutes": round(sum(row.get("step_time", 0.0) for row in rows) / 60, 2),
        }
        # The run is stopped and not complete, so its adapter is in the last checkpoint only.
        adapter = output / f"checkpoint-{size['rounds']}" / "adapter"
        return size | self.evaluate(adapter, output.with_name(output.name + "-scores"))


def generated_tokens(output: Path) -> list[int]:
    """Returns the running total of generated tokens: 0 before the first round, then the total after each round."""
    path = output / run_files.METRICS
    totals = [0]
    for row in read_jsonl(path) if path.exists() else ():
        if row.values["step"] == 0:  # a validation before the first round
            continue
        # A round that failed and was taken back has no metrics.
        new = row.values.get("completions/total_tokens", 0) + row.values.get("expand/new_tokens", 0)
        totals.append(totals[-1] + new)
    return totals


def _mean_per_round(totals: list[int]) -> float:
    """Returns the mean number of tokens of a round from their running total; 0 before the first round."""
    return totals[-1] / max(1, len(totals) - 1)


def run(command: str, arguments: list[str]) -> None:
    """Prints one r3lite command and runs it in a process of its own; raises CalledProcessError if it fails."""
    print(f"$ python -m r3lite.{command} {shlex.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", f"r3lite.{command}", *arguments], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="variants; by default all algorithms")
    parser.add_argument("--variant", action="append", default=[], metavar="NAME=FLAGS", help="one more, by its flags")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="that the model generates in each run")
    parser.add_argument(
        "--dtype", default="auto", choices=["auto", "fp32", "bf16"], help="auto: bf16 if the CPU has it"
    )
    parser.add_argument("--work", type=Path, default=Path("runs/algorithms"), help="folder of the runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to which finished runs are added")
    flags = parser.parse_args()
    cpu = torch.device("cpu")
    precision = Precision(resolve_dtype(flags.dtype, cpu), cpu)
    provenance = records.provenance(precision)
    variants = VARIANTS | {name: shlex.split(text) for name, _, text in (v.partition("=") for v in flags.variant)}
    page = flags.results / "algorithms.md"
    path = flags.results / "algorithms.json"
    for seed in flags.seeds:
        world = Seed(flags.work, seed, provenance["precision"])
        world.begin()
        for name in flags.only or variants:
            about = {"section": name, "seed": seed, "budget": flags.tokens, "flags": shlex.join(variants[name])}
            about |= provenance | {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
            if any(same_run(about, finished) for finished in records.read(path)):
                continue
            result = world.learn(name, variants[name], flags.tokens)
            runs = records.add(path, about | {"sft": world.sft_scores(), "rl": result})
            write_text(page, algorithms_page.page(runs))


def same_run(a: dict, b: dict) -> bool:
    """Returns whether two runs do the same work.

    The commit does not count: a finished run is not repeated because a later commit is checked out.
    """
    return all(a[key] == b[key] for key in ("section", "seed", "budget", "flags", "precision"))


if __name__ == "__main__":
    main()
