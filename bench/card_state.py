"""What the stages of bench.card have left in their folders, and the tables that are made of it. Starts nothing."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from bench.recipe_page import spread
from bench.records import table
from r3lite.core import run_files
from r3lite.core.files import read_record
from r3lite.core.inherited import ADAPTER
from r3lite.evaluation.folder import COMPARISON
from r3lite.evaluation.scores import FULL_RECALL_EM
from r3lite.training import checkpoint, metrics

START = b'{"step": '  # of each line of run_files.EPISODES
LINES = 20  # of the log of a stage that failed
# What the table of evaluations shows, with titles.
SCORES = {"em": "EM", FULL_RECALL_EM: "EM, full recall", "f1": "F1", "retrieval_recall": "recall"}
SCORES |= {"mean_searches": "searches", "format_adherence": "well-formed"}


def adapter_of(output: Path) -> Path | None:
    """The adapter that a training has left: that of the complete run, else that of its newest sound checkpoint.

    None if no round was learned from.
    """
    if (output / run_files.SUMMARY).exists():
        return output / ADAPTER
    newest = checkpoint.newest_valid(output)
    if newest is None or newest == checkpoint.folders_by_step(output).get(0):
        return None
    return newest / ADAPTER


def training_of(output: Path) -> dict:
    """How far a training is: rounds, samples (ends or episodes), their number in an hour of rounds, the mean reward of
    the first and of the last third of the rounds, and the metrics of the last round."""
    rows = [row for row in metrics.read(output / run_files.METRICS) if row["step"] > 0]
    if not rows:
        return {"rounds": 0, "samples": 0}
    last = rows[-1]
    samples = sample_count(output / run_files.EPISODES, last["step"])
    seconds = sum(row["step_time"] for row in rows)
    progress = {"rounds": last["step"], "samples": samples, "samples_per_hour": round(3600 * samples / seconds)}
    rewards = [row["reward"] for row in rows if row.get("reward") is not None]
    if rewards:
        third = -(-len(rewards) // 3)
        progress["reward_thirds"] = [fmean(rewards[:third]), fmean(rewards[-third:])]
    return progress | {"last": {name: value for name, value in last.items() if value is not None}}


def sample_count(path: Path, rounds: int) -> int:
    """The samples of the first rounds. What a round has sampled is written before it is learned from."""
    count = 0
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n") and int(line[len(START) : line.index(b",")]) <= rounds:
                count += 1
    return count


def scores_of(output: Path) -> dict:
    """The scores of an evaluation that is complete."""
    scores = read_record(output / run_files.SCORES, "").values
    return {"scores": {name: scores.get(name) for name in ("n", "finish", *SCORES)}}


def comparison_of(output: Path) -> dict:
    """The differences of a comparison that is complete."""
    comparison = read_record(output / COMPARISON, "").values
    return {"n": comparison["n"], "metrics": comparison["metrics"]}


def last_lines(log: Path, folder: Path) -> list[str]:
    """The end of a log; files in the folder of the run are named from there."""
    text = log.read_text(encoding="utf-8", errors="replace").replace(f"{folder}/", "")
    return [line for line in text.splitlines() if line.strip()][-LINES:]


def tables(rows: Sequence[dict]) -> str:
    """The trainings and the evaluations of a run, of rows as bench.card records them."""
    trainings = []
    evaluations = []
    for row in rows:
        if row["kind"] == "train":
            trainings.append(_training_row(row))
        elif row["kind"] == "evaluate" and "scores" in row:
            over = [r for r in rows if r["kind"] == "compare" and r["label"] == row["label"]]
            evaluations.append(_evaluation_row(row, over))
    means = [_mean_row(row) for row in rows if row["kind"] == "compare" and len(row["seeds"]) > 1 and "metrics" in row]
    return "\n\n".join(table(part) for part in (trainings, evaluations, means) if part)


def _training_row(row: dict) -> dict:
    shown = {"RL on": row["label"], "seed": row["seeds"][0], "ended": row["state"], "minutes": _minutes(row)}
    shown |= {name: row.get(name) for name in ("rounds", "samples", "samples_per_hour")}
    if "reward_thirds" in row:
        first, last = row["reward_thirds"]
        shown["reward, first and last third"] = f"{first:.3f} to {last:.3f}"
    if "kl" in row.get("last", {}):
        shown["kl"] = f"{row['last']['kl']:.2g}"
    return shown


def _evaluation_row(row: dict, comparisons: Sequence[dict]) -> dict:
    scores = row["scores"]
    shown = {"model": row["label"], "seed": row["seeds"], "questions": scores["n"], "minutes": _minutes(row)}
    shown |= {title: spread(scores.get(name)) for name, title in SCORES.items()}
    for comparison in comparisons:
        if comparison["seeds"] == row["seeds"] and "metrics" in comparison:
            shown["EM over cold"] = spread(comparison["metrics"]["em"], "difference", "+")
    return shown


def _mean_row(row: dict) -> dict:
    differences = {f"{SCORES[name]} over cold": row["metrics"][name] for name in ("em", "f1")}
    shown = {"model": row["label"], "mean of seeds": row["seeds"]}
    return shown | {title: spread(entry, "difference", "+") for title, entry in differences.items()}


def _minutes(row: dict) -> str:
    return f"{row['seconds'] / 60:.1f}"
