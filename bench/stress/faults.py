"""Kills, at random moments, every command that writes files; injects other faults, and checks the files afterwards.

    python -m bench.stress.faults                                # all, into bench/results/faults.json
    python -m bench.stress.faults --kills 8 --only sft ppo       # 8 kills, of cases whose names begin with sft or ppo
    python -m bench.stress.faults --quick --results FOLDER       # a selection that takes less than a minute

Each case (fault_cases.py) runs once without a fault. Then it is killed at a moment and resumed; some resumed runs are
killed as well. A moment is an event of a run, such as the opening of a file or an fsync (fault_runs.py). Afterwards the
output folder must have the same files as without a fault, equal bit for bit except for times, speeds and memory. A
request may only be sent again if its reply was lost.

The same must hold after a full disk, a folder that became read-only, and a clock that jumped back. A run that ends with
one of these faults must print one message and no traceback.

fault_ends.py has the faults that do not happen at a moment of a case: two writers, cut files, NaN, a killed server.
"""

import argparse
import collections
import itertools
import os
import random
import tempfile
import time
from pathlib import Path

from bench import options, records
from bench.stress.fault_bench import Bench
from bench.stress.fault_cases import CASES, CASES_BY_NAME, Case, Server
from bench.stress.fault_ends import run_ends
from bench.stress.fault_runs import ROOT, draw_moments, preload
from r3lite.devices import machine

KILLS = 100  # over all cases, each at a moment
TIMED = 16  # further kills over all cases, each after a random time
OTHERS = 2  # faults of each other kind, for each case
SECOND_KILL_SHARE = 0.3  # share of the kills after which the resumed run is killed, too
TORN_SHARE = 0.5  # share of the kills that also truncate the file that was open
KILL_FAULTS = ("kill", "torn", "timed")
OTHER_FAULTS = ("full", "readonly", "locked", "clock")
# Weights by which the kills are divided among the cases: less for cases that are similar to others, or short.
DEFAULT_WEIGHT = 3
WEIGHTS = {"sft, spans": 1, "sft, nf4 cache": 2, "report": 1, "collect, gold": 2}
# Case, kind of fault, and its moment as a share of all moments.
QUICK = (
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


def kill_cases(bench: Bench, cases: list[Case], count: int) -> None:
    """Kills the cases about `count` times in all, by their weights; each at a moment that `draw_moments` chooses."""
    weights = {case.name: WEIGHTS.get(case.name, DEFAULT_WEIGHT) for case in cases}
    total = sum(weights.values())
    for case in cases:
        kills = max(1, round(count * weights[case.name] / total)) if count else 0
        moments = bench.reference(case).result.moments
        for moment in list(draw_moments(moments, kills, bench.rng)):
            second_moment = None
            if bench.rng.random() < SECOND_KILL_SHARE:
                second_moment = bench.rng.randrange(len(moments))
            kind = "torn" if bench.rng.random() < TORN_SHARE else "kill"
            bench.kill_and_resume(case, moment, kind=kind, second_moment=second_moment)


def inject_other_faults(bench: Bench, cases: list[Case], count: int) -> None:
    """Injects each kind of OTHER_FAULTS into each case, at `count` moments; the clock is set back only once."""
    for case in cases:
        moments = bench.reference(case).result.moments
        for kind in OTHER_FAULTS:
            for moment in list(draw_moments(moments, 1 if kind == "clock" else count, bench.rng)):
                bench.inject_and_resume(case, kind, moment)


def run_quick_faults(bench: Bench) -> None:
    """Injects the faults of QUICK."""
    for name, kind, share in QUICK:
        case = CASES_BY_NAME[name]
        moment = int(share * len(bench.reference(case).result.moments))
        if kind in OTHER_FAULTS:
            bench.inject_and_resume(case, kind, moment)
        else:
            bench.kill_and_resume(case, moment, kind)


def table(fault_records: list[dict]) -> dict[str, dict[str, int]]:
    """Returns for each case and kind of fault three numbers.

    `tried`: how many faults were injected; `held`: after how many of them the files were right; `kills`: how many kills
    these faults took.
    """
    counts: dict[str, dict[str, int]] = collections.defaultdict(lambda: {"tried": 0, "held": 0, "kills": 0})
    for record in fault_records:
        kind = "kill" if record["fault"] in KILL_FAULTS else record["fault"]
        row = counts[f"{record['case']}: {kind}"]
        row["tried"] += 1
        row["held"] += record["held"]
        row["kills"] += record.get("kills", 0)
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
    flags = parser.parse_args(argv)
    os.environ["GOOGLE_API_KEY"] = "key"  # any key will do: `Server` stands in for Gemini
    preload()
    with tempfile.TemporaryDirectory() as temporary:
        folder = flags.work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        fault_records: list[dict] = []
        start_time = time.monotonic()
        provenance = {
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "section": "quick" if flags.quick else ", ".join((*flags.parts, *filter(None, flags.only))),
            "commit": records.commit(ROOT),
            "processor": machine.processor(),
            "seed": flags.seed,
        }

        def save() -> None:
            results = {
                "seconds": round(time.monotonic() - start_time),
                "tried": len(fault_records),
                "held": sum(record["held"] for record in fault_records),
                "table": table(fault_records),
                "records": fault_records,
            }
            records.add(flags.results / "faults.json", provenance | results)

        rng = random.Random(flags.seed)
        bench = Bench(folder, Server(), rng=rng, records=fault_records, save=save, brief=flags.quick)
        cases = [case for case in CASES if case.name.startswith(tuple(flags.only))]
        if flags.quick:
            run_quick_faults(bench)
        if "kills" in flags.parts and not flags.quick:
            kill_cases(bench, cases, flags.kills)
            for case in itertools.islice(itertools.cycle(cases), flags.timed):
                bench.kill_after_random_time(case)
        if "others" in flags.parts and not flags.quick:
            inject_other_faults(bench, cases, flags.others)
        if "ends" in flags.parts and not flags.quick:
            run_ends(bench, tuple(flags.only))
    passed = sum(record["held"] for record in fault_records)
    kills = sum(record.get("kills", 0) for record in fault_records)
    print(f"{passed} of {len(fault_records)} held; {kills} kills")
    return int(passed < len(fault_records))


if __name__ == "__main__":
    raise SystemExit(main())
