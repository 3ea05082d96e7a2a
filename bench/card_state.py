"""Reads the output folders of the commands that bench.card runs: trainings, evaluations and comparisons.

Also makes the tables that bench.card prints at the end. Runs no command itself.
"""

import math
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

LINE_START = b'{"step": '  # how each line of run_files.EPISODES begins; the number of the round follows
LAST_LINES = 20  # lines that are shown of the log of a failed stage
SECONDS_AN_HOUR = 3600
# The columns of the table of evaluations: the key in scores.json, and the title.
SCORES = {"em": "EM", FULL_RECALL_EM: "EM, full recall", "f1": "F1", "retrieval_recall": "recall"}
SCORES |= {"mean_searches": "searches", "format_adherence": "well-formed"}


def adapter_of(output: Path) -> Path | None:
    """Returns the folder of a training's adapter: of the complete run, else of its newest valid checkpoint.

    None if the training has completed no round. The checkpoint of step 0 does not count: its adapter is the
    one that the training began with.
    """
    if (output / run_files.SUMMARY).exists():
        return output / ADAPTER
    newest = checkpoint.newest_valid(output)
    if newest is None or newest == checkpoint.folders_by_step(output).get(0):
        return None
    return newest / ADAPTER


def training_of(output: Path) -> dict:
    """Returns how far a training is.

    rounds: the number of the last round in the log
    samples: the samples of these rounds. A sample is an episode; with `--learn answer` it is the last turn of one.
    samples_per_hour: samples per hour of step time
    reward_thirds: the mean rewards of the first and of the last third of the rounds
    last: the metrics of the last round
    """
    rows = [row for row in metrics.read(output / run_files.METRICS) if row["step"] > 0]
    if not rows:
        return {"rounds": 0, "samples": 0}
    last = rows[-1]
    samples = sample_count(output / run_files.EPISODES, last["step"])
    # A round that ended with NotFinite and was rolled back has a record without metrics, so without a step time.
    seconds = sum(row.get("step_time", 0.0) for row in rows)
    per_hour = round(SECONDS_AN_HOUR * samples / seconds) if seconds else 0
    progress = {"rounds": last["step"], "samples": samples, "samples_per_hour": per_hour}
    rewards = [row["reward"] for row in rows if row.get("reward") is not None]
    if rewards:
        third = math.ceil(len(rewards) / 3)
        progress["reward_thirds"] = [fmean(rewards[:third]), fmean(rewards[-third:])]
    return progress | {"last": {name: value for name, value in last.items() if value is not None}}


def sample_count(path: Path, rounds: int) -> int:
    """Returns the number of samples of rounds 1 to `rounds` in the file of samples.

    A round writes its samples before it learns from them, so the file may have those of one more round: they do not
    count. Neither does a last line that is being written.
    """
    count = 0
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n") and _round_of(line) <= rounds:
                count += 1
    return count


def _round_of(line: bytes) -> int:
    """Returns the number of the round that a line of the file of samples belongs to.

    Does not parse the whole line as JSON, because the file is large and bench.card reads all its lines again and again.
    """
    return int(line[len(LINE_START) : line.index(b",")])


def scores_of(output: Path) -> dict:
    """Returns the scores of a complete evaluation, as bench.card records them."""
    scores = read_record(output / run_files.SCORES, "").values
    return {"scores": {name: scores.get(name) for name in ("n", "finish", *SCORES)}}


def comparison_of(output: Path) -> dict:
    """Returns the differences of a complete comparison, and its number of questions `n`."""
    comparison = read_record(output / COMPARISON, "").values
    return {"n": comparison["n"], "metrics": comparison["metrics"]}


def last_lines(log: Path, folder: Path) -> list[str]:
    """Returns the last lines of a log that are not blank.

    Paths of files in `folder`, the run's folder, are shortened to be relative to it.
    """
    text = log.read_text(encoding="utf-8", errors="replace").replace(f"{folder}/", "")
    return [line for line in text.splitlines() if line.strip()][-LAST_LINES:]


def tables(rows: Sequence[dict]) -> str:
    """Returns the tables of a run: trainings, evaluations, and the means over the seeds if there are several.

    `rows` are the records of the stages, as bench.card writes them.
    """
    trainings = []
    evaluations = []
    for row in rows:
        if row["kind"] == "train":
            trainings.append(_training_row(row))
        elif row["kind"] == "evaluate" and "scores" in row:
            comparisons = [r for r in rows if r["kind"] == "compare" and r["label"] == row["label"]]
            evaluations.append(_evaluation_row(row, comparisons))
    means = [_mean_row(row) for row in rows if row["kind"] == "compare" and len(row["seeds"]) > 1 and "metrics" in row]
    return "\n\n".join(table(table_rows) for table_rows in (trainings, evaluations, means) if table_rows)


def _training_row(row: dict) -> dict:
    cells = {"RL on": row["label"], "seed": row["seeds"][0], "ended": row["state"], "minutes": _minutes(row)}
    cells |= {name: row.get(name) for name in ("rounds", "samples", "samples_per_hour")}
    if "reward_thirds" in row:
        first, last = row["reward_thirds"]
        cells["reward, first and last third"] = f"{first:.3f} to {last:.3f}"
    if "kl" in row.get("last", {}):
        cells["kl"] = f"{row['last']['kl']:.2g}"
    return cells


def _evaluation_row(row: dict, comparisons: Sequence[dict]) -> dict:
    scores = row["scores"]
    cells = {"model": row["label"], "seed": row["seeds"], "questions": scores["n"], "minutes": _minutes(row)}
    cells |= {title: spread(scores.get(name)) for name, title in SCORES.items()}
    for comparison in comparisons:
        if comparison["seeds"] == row["seeds"] and "metrics" in comparison:
            # "cold" is the SFT adapter that RL began with: its EM is subtracted.
            cells["EM over cold"] = spread(comparison["metrics"]["em"], "difference", "+")
    return cells


def _mean_row(row: dict) -> dict:
    # "cold" is the SFT adapter that RL began with: its score is subtracted.
    differences = {f"{SCORES[name]} over cold": row["metrics"][name] for name in ("em", "f1")}
    cells = {"model": row["label"], "mean of seeds": row["seeds"]}
    return cells | {title: spread(entry, "difference", "+") for title, entry in differences.items()}


def _minutes(row: dict) -> str:
    return f"{row['seconds'] / 60:.1f}"
