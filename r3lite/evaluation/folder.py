"""The folder of an evaluation: what its files are called, whether one may be written, how two are compared."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from r3lite.core import command
from r3lite.core.errors import R3LiteError
from r3lite.core.files import names_in, read_jsonl, sole_writer, write_json
from r3lite.core.invocation import load_toml
from r3lite.core.records import Record
from r3lite.evaluation.comparisons import compare, pairs
from r3lite.evaluation.scores import Marks
from r3lite.evaluation.tables import comparison_table
from r3lite.settings.commands import with_baseline

CONFIG, PREDICTIONS, SCORES, COMPARISON = "config.toml", "predictions.jsonl", "scores.json", "comparison.json"
UNFINISHED = {CONFIG, PREDICTIONS, "judge-cache"}  # what is there before SCORES, which is written last


def check_output(config: Any, output: Path) -> None:
    """Refuses a folder that holds anything but what this very evaluation has left unfinished."""
    if (output / SCORES).exists():
        remedy = f"Pass another folder, such as {output / 'evaluation'}."
        raise R3LiteError(f"--output {output} already has an evaluation", remedy)
    command.check_output(output, "evaluate", config, UNFINISHED)


def compare_predictions(a: str, b: str, seed: int, folder: str | None) -> None:
    """Compares two evaluations of the same questions; writes comparison.json if there is a folder for it."""
    ours, theirs = read_predictions(a), read_predictions(b)
    check_same_questions(a, b, ours, theirs)
    ours_of_all, theirs_of_all = paired(ours, theirs)
    counted = len(pairs(ours_of_all, theirs_of_all))
    found = {"n": counted, "a": a, "b": b, "metrics": compare(ours_of_all, theirs_of_all, seed)}
    if counted < len(ours):
        found["retrieval_failures"] = len(ours) - counted
    print(comparison_table(found | {"a": named(a), "b": named(b)}))
    if folder:
        output = Path(folder)
        with sole_writer(output):
            if names_in(output):
                raise R3LiteError(f"--output {output} is not an empty folder", "Pass another folder.")
            write_json(output / COMPARISON, found)
        print(f"written to {output / COMPARISON}")


def named(path: str) -> str:
    """The path of an evaluation, with its baseline if it is a folder whose settings name one."""
    kept = Path(path) / CONFIG
    return with_baseline(path, load_toml(kept).get("evaluate", {}) if kept.exists() else {})


def predictions_of(lines: Iterable[Record]) -> dict[str, tuple[str, Marks]]:
    """Question and marks of each line of predictions.jsonl, by id.

    Every command reads predictions with it, so that all count the same questions.
    """
    found = {}
    for line in lines:
        id = line.identifier("id")
        if id in found:
            raise line.error(f"duplicate id {id!r}")
        found[id] = line.text("question"), Marks.from_json(line)
    return found


def read_predictions(path: str | Path) -> dict[str, tuple[str, Marks]]:
    """The same of a file, or of that of an evaluation's folder; at least one."""
    file = Path(path) / PREDICTIONS if Path(path).is_dir() else Path(path)
    remedy = "Pass an evaluation's folder, or its predictions.jsonl."
    found = predictions_of(read_jsonl(file, remedy))
    if not found:
        raise R3LiteError(f"{file} has no predictions", remedy)
    return found


def paired(ours: dict[str, tuple[str, Marks]], theirs: dict[str, tuple[str, Marks]]) -> tuple[list[Marks], list[Marks]]:
    """Both marks of each question, in the order of the first."""
    return [marks for _, marks in ours.values()], [theirs[id][1] for id in ours]


def check_same_questions(a: str, b: str, ours: dict, theirs: dict) -> None:
    """Raises R3LiteError unless two evaluations are of the same questions."""
    remedy = "Evaluate both on the same --data with the same --limit."
    only = [sorted(x.keys() - y.keys()) for x, y in ((ours, theirs), (theirs, ours))]
    if any(only):
        differences = " and ".join(f"{len(ids)} only in {x}, such as {ids[0]}" for x, ids in zip((a, b), only) if ids)
        raise R3LiteError(f"the evaluations have different questions: {differences}", remedy)
    if other := [id for id in ours if ours[id][0] != theirs[id][0]]:
        raise R3LiteError(f"{len(other)} ids, such as {other[0]}, belong to different questions in {a} and {b}", remedy)
