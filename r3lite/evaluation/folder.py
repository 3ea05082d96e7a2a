"""The folder of an evaluation: what its files are called, whether one may be written, how they are compared."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r3lite.core import command
from r3lite.core.errors import R3LiteError
from r3lite.core.files import names_in, read_jsonl, sole_writer, write_json
from r3lite.core.invocation import load_toml
from r3lite.core.records import Record
from r3lite.evaluation.comparisons import compare, compare_sets, countable
from r3lite.evaluation.scores import Marks
from r3lite.evaluation.tables import comparison_table, pooled_table
from r3lite.settings.commands import with_baseline

CONFIG, PREDICTIONS, SCORES, COMPARISON = "config.toml", "predictions.jsonl", "scores.json", "comparison.json"
UNFINISHED = {CONFIG, PREDICTIONS, "judge-cache"}  # what is there before SCORES, which is written last


def check_output(config: Any, output: Path) -> None:
    """Refuses a folder that holds anything but what this very evaluation has left unfinished."""
    if (output / SCORES).exists():
        remedy = f"Pass another folder, such as {output / 'evaluation'}."
        raise R3LiteError(f"--output {output} already has an evaluation", remedy)
    command.check_output(output, "evaluate", config, UNFINISHED)


def compare_predictions(pairs: Sequence[tuple[str, str]], seed: int, folder: str | None) -> None:
    """Compares two evaluations of the same questions, or several pairs of them; writes comparison.json if there is a
    folder for it."""
    if len(pairs) == 1:
        ((a, b),) = pairs
        comparison = compare_pair(a, b, seed)
        print(comparison_table(comparison | {"a": named(a), "b": named(b)}))
    else:
        comparison = compare_pairs(pairs, seed)
        print(pooled_table(comparison, named))
    if folder:
        output = Path(folder)
        with sole_writer(output):
            if names_in(output):
                raise R3LiteError(f"--output {output} is not an empty folder", "Pass another folder.")
            write_json(output / COMPARISON, comparison)
        print(f"written to {output / COMPARISON}")


def compare_pair(a: str, b: str, seed: int) -> dict:
    """What comparison.json has of two evaluations."""
    ours, theirs = read_predictions(a), read_predictions(b)
    check_same_questions(a, b, ours, theirs)
    ours_of_all, theirs_of_all = paired(ours, theirs)
    counted = len(countable([ours_of_all, theirs_of_all]))
    comparison = {"n": counted, "a": a, "b": b, "metrics": compare(ours_of_all, theirs_of_all, seed)}
    if counted < len(ours):
        comparison["retrieval_failures"] = len(ours) - counted
    return comparison


@dataclass(frozen=True)
class QuestionSet:
    """Evaluations of the same questions: `pairs[i]` are two of them, of which `marks[i]` are the marks.

    `questions` has their ids and texts, in the order of all marks.
    """

    questions: tuple[tuple[str, str], ...]
    pairs: list[tuple[str, str]]
    marks: list[tuple[list[Marks], list[Marks]]]


def compare_pairs(pairs: Sequence[tuple[str, str]], seed: int) -> dict:
    """What comparison.json has of several pairs: pairs of the same questions are seeds of one set of questions."""
    sets = question_sets(pairs)
    result = compare_sets([of_set.marks for of_set in sets], seed)
    entries = []
    for of_set, metrics in zip(sets, result["sets"], strict=True):
        paths = {"a": [a for a, _ in of_set.pairs], "b": [b for _, b in of_set.pairs]}
        counted = len(countable([marks for pair in of_set.marks for marks in pair]))
        entry = {"n": counted} | paths | {"metrics": metrics}
        if counted < len(of_set.questions):
            entry["retrieval_failures"] = len(of_set.questions) - counted
        entries.append(entry)
    lists = {"a": ",".join(a for a, _ in pairs), "b": ",".join(b for _, b in pairs)}
    total = sum(entry["n"] for entry in entries)
    return {"n": total} | lists | {"metrics": result["metrics"], "sets": entries}


def question_sets(pairs: Sequence[tuple[str, str]]) -> list[QuestionSet]:
    """The pairs of evaluations by their questions. Raises R3LiteError if two sets have some questions in common: these
    would be counted twice."""
    sets: list[QuestionSet] = []
    for a, b in pairs:
        ours, theirs = read_predictions(a), read_predictions(b)
        check_same_questions(a, b, ours, theirs)
        questions = {(id, text) for id, (text, _) in ours.items()}
        of_pair = None
        for of_set in sets:
            common = questions.intersection(of_set.questions)
            if len(common) == len(questions) == len(of_set.questions):
                of_pair = of_set
            elif common:
                other = of_set.pairs[0][0]
                cause = f"{a} and {other} have {len(common)} questions in common, such as {min(common)[0]}, but not all"
                raise R3LiteError(cause, "Evaluate all seeds of a set on the same --data with the same --limit.")
        if of_pair is None:
            of_pair = QuestionSet(tuple((id, text) for id, (text, _) in ours.items()), [], [])
            sets.append(of_pair)
        of_pair.pairs.append((a, b))
        marks_of_a = [ours[id][1] for id, _ in of_pair.questions]
        marks_of_b = [theirs[id][1] for id, _ in of_pair.questions]
        of_pair.marks.append((marks_of_a, marks_of_b))
    return sets


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
