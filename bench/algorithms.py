"""Algorithms of reinforcement learning, compared on the sample world at equal numbers of generated tokens.

    python -m bench.algorithms                      # all algorithms, seeds 0, 1 and 2; hours of one core
    python -m bench.algorithms --only ppo grpo --seeds 0 --tokens 50000
    python -m bench.algorithms --only grpo-mild --variant "grpo-mild=--algorithm grpo --kl-beta 0.01"

For each seed: the quickstart's index, hasty trajectories and SFT adapter, once; then each variant learns from that
adapter, with a constant rate after the warm-up, up to the end of a round at about --tokens generated tokens, and
answers the test questions. luffy and hybrid get flawless trajectories of all training questions as traces,
dgpo a teacher: an adapter that learned from 300 of them. What is finished under --work is not done again, and a run
that was killed goes on, so the same command resumes. Finished runs are added to bench/results/algorithms.json, and none
is replaced; bench/algorithms_page.py says what the page tells.
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
MANY_ROUNDS = 1000  # more than any budget takes
WARMUP_ROUNDS = 1
VARIANTS = {name: ["--algorithm", name] for name in ALGORITHMS}


class Seed:
    """The runs of one seed, under one folder."""

    def __init__(self, work: Path, seed: int, precision: str):
        self.folder, self.seed, self.world = work / str(seed), seed, shipped("data", "world")
        self.common = ["--preset", "tiny", "--seed", str(seed)]
        self.shared = [*self.common, "--dtype", precision]
        self.search = ["--index", str(self.folder / "index")]

    def begin(self) -> None:
        """Makes what all variants begin with, unless it is there."""
        index = self.folder / "index"
        if not index.exists():
            run("index", [*self.common, "--corpus", str(self.world / "corpus.jsonl"), "--output", str(index)])
        hasty = self.collected("trajectories", ["--limit", str(TRAJECTORIES), "--hurried-share", str(HURRIED)])
        self.taught("sft", ["--data", str(hasty)])

    def collected(self, name: str, flags: list[str]) -> Path:
        """Trajectories of the training questions, made unless they are there."""
        output = self.folder / f"{name}.jsonl"
        if not output.exists():
            data = ["--data", str(self.world / "train.jsonl"), *self.search]
            run("collect", [*self.common, *data, *flags, "--output", str(output)])
        return output

    def taught(self, name: str, flags: list[str]) -> Path:
        """An adapter that SFT made, unless it is there."""
        output = self.folder / name
        if not (output / run_files.SUMMARY).exists():
            run("sft", [*self.shared, *flags, "--output", str(output), "--resume", "auto"])
        return output

    def guides(self, flags: list[str]) -> list[str]:
        """The flags of the teacher or of the traces that a variant's algorithm needs."""
        algorithm = ALGORITHMS[flags[flags.index("--algorithm") + 1] if "--algorithm" in flags else "ppo"]
        if algorithm.has_traces:
            return ["--traces", str(self.collected("flawless", []))]
        if algorithm.has_teacher:
            data = ["--data", str(self.collected("flawless", [])), "--limit", str(TRAJECTORIES)]
            adapter = str(self.taught("teacher", data))
            return ["--teacher", "tiny", "--teacher-adapter", adapter, "--teacher-quantize", "none"]
        return []

    def sft_scores(self) -> dict:
        return self.evaluate(self.folder / "sft" / "adapter", self.folder / "sft-scores")

    def evaluate(self, adapter: Path, output: Path) -> dict:
        """The scores of an adapter on the test questions, with each question's exact match and F1."""
        if not (output / run_files.SCORES).exists():
            arguments = [*self.shared, "--data", str(self.world / "test.jsonl"), *self.search]
            run("evaluate", [*arguments, "--adapter", str(adapter), "--output", str(output)])
        found = json.loads((output / run_files.SCORES).read_text(encoding="utf-8"))
        answers = [row.values for row in read_jsonl(output / run_files.PREDICTIONS)]
        metrics = ("em", "f1", "format_adherence", "retrieval_recall", "mean_searches")
        return {name: round(found[name]["value"], 4) for name in metrics} | {
            "each_em": "".join(str(int(row["em"])) for row in answers),
            "each_f1": [round(row["f1"], 4) for row in answers],
        }

    def learn(self, name: str, flags: list[str], budget: int) -> dict:
        """One variant, trained until it has generated `budget` tokens, and its scores."""
        output = self.folder / f"{name}-{budget}"  # another budget is another run, maybe of a later commit
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
        while (missing := budget - (made := generated(output))[-1]) > (mean := made[-1] / max(1, len(made) - 1)) / 2:
            # Far fewer rounds than it will take, as episodes become longer; then one by one.
            run("ppo", [*arguments, "--stop-after", str(max(1, int(0.6 * missing / mean)) if mean else 1)])
        rows = [row.values for row in read_jsonl(output / run_files.METRICS)]
        told = {
            "tokens": made[-1],
            "rounds": len(made) - 1,
            "minutes": round(sum(r["step_time"] for r in rows) / 60, 2),
        }
        adapter = output / f"checkpoint-{told['rounds']}" / "adapter"  # the run is stopped, not complete
        return told | self.evaluate(adapter, output.with_name(output.name + "-scores"))


def generated(output: Path) -> list[int]:
    """How many tokens the model had generated before the first round, and after each one."""
    path, made = output / run_files.METRICS, [0]
    for row in read_jsonl(path) if path.exists() else ():
        new = row.values["completions/total_tokens"] + row.values.get("expand/new_tokens", 0)
        made.append(made[-1] + new)
    return made


def run(command: str, arguments: list[str]) -> None:
    """Runs one command as a user would, and shows it."""
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
    told = records.provenance(precision)
    variants = VARIANTS | {name: shlex.split(text) for name, _, text in (v.partition("=") for v in flags.variant)}
    page, path = flags.results / "algorithms.md", flags.results / "algorithms.json"
    for seed in flags.seeds:
        world = Seed(flags.work, seed, told["precision"])
        world.begin()
        for name in flags.only or variants:
            about = {"section": name, "seed": seed, "budget": flags.tokens, "flags": shlex.join(variants[name])}
            about |= told | {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
            if any(same_run(about, known) for known in records.read(path)):
                continue
            found = world.learn(name, variants[name], flags.tokens)
            runs = records.add(path, about | {"sft": world.sft_scores(), "rl": found})
            write_text(page, algorithms_page.page(runs))


def same_run(a: dict, b: dict) -> bool:
    """Whether two runs do the same work; a run is not measured anew because a later commit is checked out."""
    return all(a[key] == b[key] for key in ("section", "seed", "budget", "flags", "precision"))


if __name__ == "__main__":
    main()
