"""Kills and other faults at random moments of every command that writes, and what is there afterwards.

    python -m bench.stress.faults                                # all, into bench/results/faults.json
    python -m bench.stress.faults --kills 8 --only sft ppo       # fewer, of cases whose names begin so
    python -m bench.stress.faults --quick --results FOLDER       # a share that takes less than a minute

A case (fault_cases.py) runs once without a fault. Then it is killed at a moment (fault_runs.py), some
twice, and the same command goes on: afterwards the folder must hold the same to the bit, but for times, speeds and
memory, and no other file; and no request may be sent again whose reply was kept. After a full disk, a folder that may
not be written any more and a clock that jumps back the same must hold, and the command must have ended with one message
and no traceback. fault_ends.py has what is not a moment of a case: two writers, cut files, NaN, the server.
"""

import argparse
import collections
import os
import random
import tempfile
import time
from pathlib import Path

from bench import options, records
from bench.stress.fault_bench import Bench
from bench.stress.fault_cases import CASES, Case, Server
from bench.stress.fault_ends import ends
from bench.stress.fault_runs import ROOT, chosen, preload
from r3lite.devices import machine

KILLS, TIMED, OTHERS = 100, 16, 2  # kills at moments, kills by the clock, faults of each other kind for each case
TWICE = 0.3  # share of kills after which the run that goes on is killed, too
OTHER_FAULTS = ("full", "readonly", "locked", "clock")
WEIGHTS = {"sft": 3, "sft, spans": 1, "sft, nf4 cache": 2, "report": 1, "collect, gold": 2}
QUICK = (  # case, fault, where in the run
    ("sft", "kill", 0.5),
    ("sft", "torn", 0.9),
    ("sft, streamed", "kill", 0.6),
    ("sft, all weights", "kill", 0.7),
    ("ppo, grpo", "kill", 0.6),
    ("collect, teacher", "kill", 0.5),
    ("index, build", "torn", 0.5),
    ("index, add", "kill", 0.8),
    ("export, folder", "kill", 0.6),
    ("prepare", "kill", 0.7),
    ("sft", "full", 0.6),
    ("export, gguf", "full", 0.5),
)


def kills(bench: Bench, cases: list[Case], count: int) -> None:
    """Spreads kills over the cases, at moments of each class in turn."""
    weights = {case.name: WEIGHTS.get(case.name, 3) for case in cases}
    total = sum(weights.values())
    for case in cases:
        share = max(1, round(count * weights[case.name] / total)) if count else 0
        _, ended, _ = bench.whole(case)
        for at in list(chosen(ended.moments, share, bench.rng)):
            again = bench.rng.randrange(len(ended.moments)) if bench.rng.random() < TWICE else None
            bench.kill(case, at, "torn" if bench.rng.random() < 0.5 else "kill", again)


def others(bench: Bench, cases: list[Case], count: int) -> None:
    for case in cases:
        _, ended, _ = bench.whole(case)
        for kind in OTHER_FAULTS:
            for at in list(chosen(ended.moments, 1 if kind == "clock" else count, bench.rng)):
                bench.other(case, kind, at)


def quick(bench: Bench) -> None:
    named = {case.name: case for case in CASES}
    for name, kind, share in QUICK:
        case = named[name]
        at = int(share * len(bench.whole(case)[1].moments))
        if kind in OTHER_FAULTS:
            bench.other(case, kind, at)
        else:
            bench.kill(case, at, kind)


def table(found: list[dict]) -> dict[str, dict[str, int]]:
    """For each command and fault: how often it was tried, and held."""
    counts: dict[str, dict[str, int]] = collections.defaultdict(lambda: {"tried": 0, "held": 0, "kills": 0})
    for record in found:
        of = counts[f"{record['case']}: {'kill' if record['fault'] in ('kill', 'torn', 'timed') else record['fault']}"]
        of["tried"] += 1
        of["held"] += record["held"]
        of["kills"] += record.get("kills", 0)
    return dict(counts)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--timed", type=int, default=TIMED)
    parser.add_argument("--others", type=int, default=OTHERS, help="of each other kind for each case")
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose names begin so")
    parser.add_argument("--quick", action="store_true")
    parts = ("kills", "others", "ends")
    parser.add_argument("--parts", nargs="*", default=parts, choices=parts)
    parser.add_argument("--work", type=Path, help="folder to work in, kept; by default a temporary one")
    parser.add_argument("--results", type=Path, default=options.RESULTS)
    given = parser.parse_args(argv)
    os.environ["GOOGLE_API_KEY"] = "key"
    preload()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found: list[dict] = []
        begun, date = time.monotonic(), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

        def save() -> None:
            made = {"date": date, "section": section, "commit": commit}
            made |= {"processor": machine.processor(), "seed": given.seed, "seconds": round(time.monotonic() - begun)}
            made |= {"tried": len(found), "held": sum(record["held"] for record in found)}
            records.add(given.results / "faults.json", made | {"table": table(found), "records": found})

        commit = records.commit(ROOT)
        section = "quick" if given.quick else ", ".join((*given.parts, *filter(None, given.only)))
        bench = Bench(folder, Server(), random.Random(given.seed), found, save, given.quick)
        cases = [case for case in CASES if case.name.startswith(tuple(given.only))]
        if given.quick:
            quick(bench)
        if "kills" in given.parts and not given.quick:
            kills(bench, cases, given.kills)
            for case in (cases * given.timed)[: given.timed]:
                bench.timed(case)
        if "others" in given.parts and not given.quick:
            others(bench, cases, given.others)
        if "ends" in given.parts and not given.quick:
            ends(bench, tuple(given.only))
    held = sum(record["held"] for record in found)
    print(f"{held} of {len(found)} held; {sum(r.get('kills', 0) for r in found)} kills")
    return int(held < len(found))


if __name__ == "__main__":
    raise SystemExit(main())
