"""Messages, requests and files that no sound program makes: each must be refused in words, or handled as it should.

    python -m bench.stress.hostile                       # all, into bench/results/hostile_inputs.json
    python -m bench.stress.hostile --only files --count 20

Hypothesis (extra bench) generates them from a seed: 100 replies to a trainer and 100 requests to a worker, 100 HTTP
requests to the three servers, 100 GGUF headers. One of them holds if it is refused with an error that names the server
or the file, or if it is answered or read correctly, in 20 s and 64 MiB, and the next sound one is answered as before. A
traceback, a wrong acceptance, a hang and anything else are found. Linux only.
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
from bench.stress.generated import examples, watched
from bench.stress.hostile_files import Files
from bench.stress.hostile_messages import ToTrainer, ToWorker
from bench.stress.hostile_requests import Requests
from r3lite.devices import machine

COUNT = 100  # of each kind
KINDS: dict[str, Callable[[Path], Any]] = {
    "messages to a trainer": ToTrainer,
    "messages to a worker": ToWorker,
    "requests": Requests,
    "files": Files,
}
PACKAGES = ("hypothesis", "gguf", "torch", "tokenizers")


def run(kind: str, count: int) -> dict:
    """Returns how many of a kind were tried and held, and what was found."""
    ways: Counter[str] = Counter()
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        attack = KINDS[kind](Path(folder))
        try:
            drawn = examples(attack.strategy, count)
            for example in drawn:
                outcome = watched(attack.judge, example)
                ways[outcome.way] += 1
                if outcome.problem:
                    problems.append({"example": example.name[:300], "problem": outcome.problem})
                    print(f"{example.name[:300]}\n    {outcome.problem}", flush=True)
        finally:
            attack.close()
    held = len(drawn) - len(problems)
    return {"tried": len(drawn), "held": held, "found": len(problems), **ways, "problems": problems}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--count", type=int, default=COUNT, help="of each kind")
    parser.add_argument("--results", type=Path, default=options.RESULTS)
    parser.add_argument("--note", default="", help="what is to be said of this run")
    arguments = parser.parse_args()
    found = 0
    for kind in arguments.only:
        date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        start = time.monotonic()
        figures = run(kind, arguments.count)
        found += figures["found"]
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
    return int(found > 0)


if __name__ == "__main__":
    raise SystemExit(main())
