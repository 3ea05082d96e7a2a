"""Speed of one process with and without a change, in pairs: `python -m bench.ranks OLD_CHECKOUT [NEW_CHECKOUT]`.

Each checkout's trainer is started once and takes steps of SFT on the tiny checkpoint when it is told to, by turns, so
that what else the machine does slows both. Prints the median over pairs of how much faster a step of the new one is.
"""

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PAIRS = 60
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
turns = lambda i: [{"role": "user", "content": f"Who is {i}?"}, {"role": "assistant", "content": f"It is {i}." * 40}]
write_jsonl(rows, [{"messages": turns(i)} for i in range(64)])
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
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    return subprocess.Popen([sys.executable, "-c", SCRIPT, folder], cwd=checkout, **pipes)


def step(trainer: subprocess.Popen) -> float:
    """The seconds of processor time that one step takes: other programs add less to it than to the clock's."""
    trainer.stdin.write("\n")
    trainer.stdin.flush()
    return float(trainer.stdout.readline())


def main(old: str, new: str = ".") -> None:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        trainers = start(Path(old), one), start(Path(new), other)
        for trainer in trainers:
            for _ in range(5):
                step(trainer)
        ratios = []
        for pair in range(PAIRS):
            order = (0, 1) if pair % 2 else (1, 0)
            seconds = {which: step(trainers[which]) for which in order}
            ratios.append(seconds[0] / seconds[1])
        for trainer in trainers:
            trainer.stdin.close()
            trainer.wait()
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"one process: {middle:.3f} times as fast as before (quartiles {low:.3f} and {high:.3f}, {PAIRS} pairs)")


if __name__ == "__main__":
    main(*sys.argv[1:])
