"""Runs quickstart on the sample world with each episode format (--format) and seed, and records the scores.

    python -m bench.protocols                       # all formats, seed 0: about ten minutes each on one core
    python -m bench.protocols --only dag --seeds 1 2

A quickstart whose results are in its folder already is not repeated: its results are read, with the commit and the
machine that it ran on. Writes bench/results/protocols.json and protocols.md.
"""

import argparse
import json
from pathlib import Path

import torch

from bench.records import ROOT, provenance, table
from r3lite import quickstart
from r3lite.core import run_files
from r3lite.core.files import write_json, write_text
from r3lite.devices.precision import Precision, resolve_dtype
from r3lite.protocols.registry import PROTOCOLS
from r3lite.settings import QuickstartSettings

RESULTS = ROOT / "bench" / "results"
SHORT_HASH = 7  # characters of a commit
SCORES = {  # key in scores.json -> title of the column
    "em": "EM",
    "f1": "F1",
    "format_adherence": "well-formed",
    "retrieval_recall": "recall",
    "mean_searches": "searches",
}
ABOUT = """`python -m bench.protocols`: quickstart with each `--format` on the sample world, 300 test questions about
entities that training never saw, greedy, with real retrieval. SFT learns from 300 trajectories of gold decompositions,
half of which end one hop too early on purpose; then {algorithm}. Formats other than
`r3` are sampled at temperature 0.5, as the base, which knows the words of `r3` alone, stays unsure of their tokens; and
`dag` has `--max-new-tokens 128` and 250 steps of SFT in place of 100: its plans are longer than the preset's turns, and
harder to learn. So the rows do not compare formats under equal conditions. `solution` does without retrieval: of
entities that it has never seen it can know nothing. In brackets intervals of 95 %, by bootstrap over the questions;
seeds differ by more."""


def measure(name: str, seed: int, folder: Path, precision: Precision) -> dict:
    """Returns the scores of a quickstart's stages, its gain in exact match, its minutes, and what it ran on.

    `name` is the format. Runs the quickstart unless `folder` has its results.
    """
    conditions_path = folder / "conditions.json"  # written last: with it, the results are complete
    if not conditions_path.exists():
        conditions = provenance(precision)
        status = quickstart.main(["--format", name, "--seed", str(seed), "--output", str(folder)])
        assert status == 0, "quickstart failed"
        write_json(conditions_path, conditions)
    conditions = json.loads(conditions_path.read_text(encoding="utf-8"))
    summary = json.loads((folder / "quickstart.json").read_text(encoding="utf-8"))
    stages = {}
    for stage in summary["stages"][1:]:  # without the base
        scores_path = folder / f"evaluate-{stage['stage'].lower()}" / run_files.SCORES
        scores = json.loads(scores_path.read_text(encoding="utf-8"))
        stage_scores = {key: scores[key] for key in SCORES}
        stage_scores["hops"] = {
            hops: {key: group[key] for key in ("em", "mean_searches")} for hops, group in scores["by_hops"].items()
        }
        stages["SFT" if stage["stage"] == "SFT" else "RL"] = stage_scores
    return {"stages": stages, "em_gain": summary["em_gain"], "minutes": summary["minutes"], **conditions}


def page(runs: list[dict]) -> str:
    """Returns the page in Markdown: a table of the scores of both stages, and one after RL by number of hops."""
    rows = []
    rows_by_hops = []
    for run in runs:
        for stage, scores in run["stages"].items():
            row = {"--format": f"`{run['section']}`", "seed": run["seed"], "stage": stage}
            rows.append(row | {title: _value(scores[key]) for key, title in SCORES.items()})
        row = {"--format": f"`{run['section']}`", "seed": run["seed"]}
        for hops, group in run["stages"]["RL"]["hops"].items():
            row |= {f"EM, {hops} hops": _value(group["em"]), f"searches, {hops} hops": _value(group["mean_searches"])}
        row |= {"minutes": run["minutes"], "commit": run["commit"][:SHORT_HASH], "precision": run["precision"]}
        rows_by_hops.append(row)
    about = ABOUT.format(algorithm=QuickstartSettings().algorithm)
    return "\n\n".join(["# Formats on the sample world", about, table(rows), "After RL:", table(rows_by_hops)]) + "\n"


def _value(score: dict) -> str:
    """Returns a score with the ends of its interval."""
    return f"{score['value']:.3f} ({score['low']:.3f}-{score['high']:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PROTOCOLS, default=list(PROTOCOLS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    args = parser.parse_args()
    path = RESULTS / "protocols.json"
    cpu = torch.device("cpu")
    precision = Precision(resolve_dtype("auto", cpu), cpu)
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else []
    for seed in args.seeds:
        for name in args.only:
            if any((run["section"], run["seed"]) == (name, seed) for run in runs):
                continue
            run = measure(name, seed, folder=Path("runs") / "protocols" / f"{name}-{seed}", precision=precision)
            runs.append({"section": name, "seed": seed, **run})
            write_json(path, {"runs": runs})
            write_text(RESULTS / "protocols.md", page(runs))


if __name__ == "__main__":
    main()
