"""Compares the speed of SFT in two checkouts of r3lite: `python -m bench.checkouts OLD_CHECKOUT [NEW_CHECKOUT]`.

Starts one process for each checkout, in which the checkout's trainer trains the tiny model. The trainers take steps in
turn, so that other load on the machine slows both alike. Two steps, one of each trainer, are a pair. Prints the median
and the quartiles, over the pairs, of (CPU seconds of the old step) / (CPU seconds of the new step).
"""

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PAIRS = 60
WARM_UP_STEPS = 5  # of each trainer, before the first pair
# The trainer: for each line of its standard input it takes a step and prints the step's CPU seconds.
SCRIPT = """
import json, sys, time
from pathlib import Path
from r3lite.assembly import supervised
from r3lite.core.files import write_jsonl
from r3lite.core.invocation import resolve

from r3lite.datasets.sources import read_data
from r3lite.settings import SftConfig
from r3lite.training import optim

rows = Path(sys.argv[1]) / "rows.jsonl"
messages = lambda i: [{"role": "user", "content": f"Who is {i}?"}, {"role": "assistant", "content": f"It is {i}." * 40}]
write_jsonl(rows, [{"messages": messages(i)} for i in range(64)])
arguments = ["--preset", "tiny", "--data", str(rows), "--validation-rows", "0", "--max-steps", "1000"]
config = resolve("sft", SftConfig(), arguments)
trainer = supervised.build_trainer(config, *read_data(config))
optim.set_rate(trainer.state.optimizer, 0.01)
for number, _ in enumerate(sys.stdin, 1):
    start = time.process_time()
    trainer.step(number)
    print(time.process_time() - start, flush=True)
"""


def start(checkout: Path, folder: str) -> subprocess.Popen:
    """Starts the trainer of a checkout, which writes its training rows to `folder`."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", SCRIPT, folder], cwd=checkout, **pipes)


def step(trainer: subprocess.Popen) -> float:
    """Lets a trainer take one step; returns its CPU seconds, which other programs change less than wall-clock time."""
    trainer.stdin.write("\n")
    trainer.stdin.flush()
    return float(trainer.stdout.readline())


def main(old: str, new: str = ".") -> None:
    """Runs the pairs. `old` and `new` are the folders of the two checkouts."""
    with tempfile.TemporaryDirectory() as old_folder, tempfile.TemporaryDirectory() as new_folder:
        trainers = {"old": start(Path(old), old_folder), "new": start(Path(new), new_folder)}
        for trainer in trainers.values():
            for _ in range(WARM_UP_STEPS):
                step(trainer)
        ratios = []
        for pair in range(PAIRS):
            order = ("old", "new") if pair % 2 else ("new", "old")
            seconds = {name: step(trainers[name]) for name in order}
            ratios.append(seconds["old"] / seconds["new"])
        for trainer in trainers.values():
            trainer.stdin.close()
            trainer.wait()
    low, median, high = statistics.quantiles(ratios, n=4)
    print(f"one process: {median:.3f} times as fast as before (quartiles {low:.3f} and {high:.3f}, {PAIRS} pairs)")


if __name__ == "__main__":
    main(*sys.argv[1:])
