"""Feeds r3lite with malformed messages, requests and files: each must be refused with an error, or handled correctly.

    python -m bench.stress.hostile                       # all, into bench/results/hostile_inputs.json
    python -m bench.stress.hostile --only files --count 20

Hypothesis (extra bench) generates them from a seed: 100 replies to a trainer and 100 requests to a worker, 100 HTTP
requests to the three servers, and 100 GGUF headers. r3lite holds against an input if

- it refuses the input with an error that names the server or the file, or answers or reads the input correctly,
- takes at most 20 s and 64 MiB, and
- answers the next sound input as before.

Everything else counts as a problem: a traceback, a wrong acceptance, a hang. Linux only.
"""

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from bench import options, records
from bench.stress.generated import examples, judge_within_limits
from bench.stress.hostile_files import Files
from bench.stress.hostile_messages import ToTrainer, ToWorker
from bench.stress.hostile_requests import Requests
from r3lite.devices import machine

COUNT = 100  # inputs of each kind
# The attack of each kind is a class: its strategy draws inputs, and its method `judge` tries one.
KINDS: dict[str, Callable[[Path], Any]] = {
    "messages to a trainer": ToTrainer,
    "messages to a worker": ToWorker,
    "requests": Requests,
    "files": Files,
}
# Packages whose versions are recorded.
PACKAGES = ("hypothesis", "gguf", "torch", "tokenizers")


def run(kind: str, count: int) -> dict:
    """Tries inputs of a kind.

    Returns how many were tried, held, refused and answered, the problems, and their number as "found".
    """
    by_outcome: Counter[str] = Counter()  # how many were refused, and how many answered
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        attack = KINDS[kind](Path(folder))
        try:
            inputs = examples(attack.strategy, count)
            for example in inputs:
                outcome = judge_within_limits(attack.judge, example)
                by_outcome[outcome.way] += 1
                if outcome.problem:
                    problems.append({"example": example.name[:300], "problem": outcome.problem})
                    print(f"{example.name[:300]}\n    {outcome.problem}", flush=True)
        finally:
            attack.close()
    tried = len(inputs)
    passed = tried - len(problems)
    return {"tried": tried, "held": passed, "found": len(problems), **by_outcome, "problems": problems}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--count", type=int, default=COUNT, help="of each kind")
    parser.add_argument("--results", type=Path, default=options.RESULTS)
    parser.add_argument("--note", default="", help="what is to be said of this run")
    arguments = parser.parse_args()
    problem_count = 0
    for kind in arguments.only:
        date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        start = time.monotonic()
        figures = run(kind, arguments.count)
        problem_count += figures["found"]
        entry = {
            "date": date,
            "section": kind,
            "commit": records.commit(records.ROOT),
            "processor": machine.processor(),
            "versions": {name: metadata.version(name) for name in PACKAGES},
            "wall_seconds": round(time.monotonic() - start),
            **figures,
        }
        if arguments.note:
            entry["note"] = arguments.note
        records.add(arguments.results / "hostile_inputs.json", entry)
        print(json.dumps({name: value for name, value in entry.items() if name != "problems"}), flush=True)
    return int(problem_count > 0)


if __name__ == "__main__":
    raise SystemExit(main())
