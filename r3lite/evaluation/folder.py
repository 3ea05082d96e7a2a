"""The folder of an evaluation: the names of its files, whether it may be written to, how two evaluations compare."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r3lite.core import earlier_output, run_files
from r3lite.core.errors import R3LiteError
from r3lite.core.files import load_toml, names_in, read_jsonl, sole_writer, write_json
from r3lite.core.records import Record
from r3lite.evaluation.comparisons import compare, compare_sets, valid_indices
from r3lite.evaluation.scores import Marks
from r3lite.evaluation.tables import comparison_table, pooled_table
from r3lite.settings.commands import with_baseline

COMPARISON = "comparison.json"
Predictions = dict[str, tuple[str, Marks]]  # by id: the text of the question, and the marks of its episode
# The files and folders that an interrupted evaluation may leave. It leaves no scores.json, which is written last.
UNFINISHED = {run_files.CONFIG, run_files.PREDICTIONS, "judge-cache"}


def check_output(config: Any, output: Path) -> None:
    """Raises R3LiteError unless a folder holds nothing but what an interrupted evaluation with these settings left."""
    if (output / run_files.SCORES).exists():
        remedy = f"Pass another folder, such as {output}-2."
        raise R3LiteError(f"--output {output} already has an evaluation", remedy, code="evaluation-exists")
    earlier_output.check_output(output, "evaluate", config, UNFINISHED)


def compare_predictions(
    pairs: Sequence[tuple[str, str]],
    seed: int,
    folder: str | None,
) -> None:
    """Compares the two evaluations of a pair, or of several pairs, and prints the comparison.

    A pair has the paths of two evaluations of the same questions. Writes comparison.json if there is a `folder`.
    """
    if len(pairs) == 1:
        a, b = pairs[0]
        comparison = compare_pair(a, b, seed)
        print(comparison_table(comparison | {"a": name_with_baseline(a), "b": name_with_baseline(b)}))
    else:
        comparison = compare_pairs(pairs, seed)
        print(pooled_table(comparison, name_with_baseline))
    if folder:
        output = Path(folder)
        with sole_writer(output):
            _check_empty(output)
            write_json(output / COMPARISON, comparison)
        print(f"written to {output / COMPARISON}")


def check_comparison(pairs: Sequence[tuple[str, str]], folder: str | None) -> None:
    """Raises R3LiteError if `compare_predictions` would refuse these pairs or this folder."""
    for question_set in question_sets(pairs):
        evaluations = [marks for pair in question_set.marks for marks in pair]
        valid_indices(evaluations)  # refuses evaluations whose questions the retriever all failed on
    if folder:
        _check_empty(Path(folder))


def _check_empty(output: Path) -> None:
    """Raises R3LiteError if there is something in the folder of a comparison."""
    if names_in(output):
        raise R3LiteError(f"--output {output} is not an empty folder", "Pass another folder.", code="output-not-empty")


def compare_pair(a: str, b: str, seed: int) -> dict:
    """Returns the content of comparison.json for two evaluations."""
    predictions_a = read_predictions(a)
    predictions_b = read_predictions(b)
    check_same_questions(a, b, predictions_a=predictions_a, predictions_b=predictions_b)
    marks_a, marks_b = paired_marks(predictions_a, predictions_b)
    n = len(valid_indices([marks_a, marks_b]))
    metrics = compare(marks_a, marks_b, seed)
    comparison = {"n": n, "a": a, "b": b, "metrics": metrics}
    if n < len(marks_a):
        comparison["retrieval_failures"] = len(marks_a) - n
    return comparison


@dataclass(frozen=True)
class QuestionSet:
    """Pairs of evaluations, a and b, of the same questions; each pair is of another training seed."""

    questions: tuple[tuple[str, str], ...]  # the id and the text of each
    pairs: list[tuple[str, str]]  # the paths of a and b
    marks: list[tuple[list[Marks], list[Marks]]]  # of the same pairs: the marks of a and b, in the order of `questions`


def compare_pairs(pairs: Sequence[tuple[str, str]], seed: int) -> dict:
    """Returns the content of comparison.json for several pairs. `seed` draws the resamples of the bootstrap.

    Pairs of the same questions are one set: their models differ in the seed of the training.
    """
    sets = question_sets(pairs)
    result = compare_sets([question_set.marks for question_set in sets], seed)
    entries = []
    for question_set, metrics in zip(sets, result["sets"], strict=True):
        evaluations = [marks for pair in question_set.marks for marks in pair]
        n = len(valid_indices(evaluations))
        entry = {
            "n": n,
            "a": [a for a, _ in question_set.pairs],
            "b": [b for _, b in question_set.pairs],
            "metrics": metrics,
        }
        if n < len(question_set.questions):
            entry["retrieval_failures"] = len(question_set.questions) - n
        entries.append(entry)
    return {
        "n": sum(entry["n"] for entry in entries),
        "a": ",".join(a for a, _ in pairs),
        "b": ",".join(b for _, b in pairs),
        "metrics": result["metrics"],
        "sets": entries,
    }


def question_sets(pairs: Sequence[tuple[str, str]]) -> list[QuestionSet]:
    """Returns sets of pairs of evaluations; pairs of the same questions are in one set.

    Raises R3LiteError if two sets have questions in common, which would be counted twice.
    """
    sets: list[QuestionSet] = []
    for a, b in pairs:
        predictions_a = read_predictions(a)
        predictions_b = read_predictions(b)
        check_same_questions(a, b, predictions_a=predictions_a, predictions_b=predictions_b)
        questions = tuple((id, text) for id, (text, _) in predictions_a.items())
        question_set = _set_of(a, questions, sets)
        if question_set is None:
            question_set = QuestionSet(questions, pairs=[], marks=[])
            sets.append(question_set)
        question_set.pairs.append((a, b))
        marks_a = [predictions_a[id][1] for id, _ in question_set.questions]
        marks_b = [predictions_b[id][1] for id, _ in question_set.questions]
        question_set.marks.append((marks_a, marks_b))
    return sets


def _set_of(
    path: str,
    questions: tuple[tuple[str, str], ...],
    sets: list[QuestionSet],
) -> QuestionSet | None:
    """Returns the set that has exactly these questions, in any order; None if no set has any of them.

    Raises R3LiteError, with the evaluation's `path`, if a set has some of the questions, but not exactly these.
    """
    match = None
    for question_set in sets:
        common = set(questions).intersection(question_set.questions)
        if len(common) == len(questions) == len(question_set.questions):
            match = question_set
        elif common:
            other_path, _ = question_set.pairs[0]
            first_id, _ = min(common)
            cause = f"{path} and {other_path} have {len(common)} questions in common, such as {first_id}, but not all"
            raise R3LiteError(
                cause, "Evaluate all seeds of a set on the same --data with the same --limit.", code="seeds-differ"
            )
    return match


def name_with_baseline(path: str) -> str:
    """Returns the path of an evaluation, with its baseline if it is a folder whose settings name one."""
    config = Path(path) / run_files.CONFIG
    settings = {}
    if config.exists():
        settings = load_toml(config).get("evaluate", {})
    return with_baseline(path, settings)


def predictions_of(lines: Iterable[Record]) -> Predictions:
    """Returns question and marks of each line of predictions.jsonl, by id; raises InvalidRecord if an id is repeated.

    Every command reads predictions with this function, so that all commands count the same questions.
    """
    predictions = {}
    for line in lines:
        id = line.identifier("id")
        if id in predictions:
            raise line.error(f"duplicate id {id!r}")
        question = line.text("question")
        predictions[id] = question, Marks.from_json(line)
    return predictions


def read_predictions(path: str | Path) -> Predictions:
    """Returns question and marks of each prediction of a file, or of the file in an evaluation's folder, by id.

    Raises R3LiteError if there is none.
    """
    file = Path(path)
    if file.is_dir():
        file = file / run_files.PREDICTIONS
    remedy = "Pass an evaluation's folder, or its predictions.jsonl."
    predictions = predictions_of(read_jsonl(file, remedy))
    if not predictions:
        raise R3LiteError(f"{file} has no predictions", remedy, code="no-predictions")
    return predictions


def paired_marks(
    predictions_a: Predictions,
    predictions_b: Predictions,
) -> tuple[list[Marks], list[Marks]]:
    """Returns the marks of both evaluations, in the order of the questions of the first."""
    marks_a = [marks for _, marks in predictions_a.values()]
    marks_b = [predictions_b[id][1] for id in predictions_a]
    return marks_a, marks_b


def check_same_questions(
    a: str,
    b: str,
    predictions_a: Predictions,
    predictions_b: Predictions,
) -> None:
    """Raises R3LiteError, with the paths `a` and `b`, unless two evaluations are of the same questions."""
    remedy = "Evaluate both on the same --data with the same --limit."
    only_in_a = predictions_a.keys() - predictions_b.keys()
    only_in_b = predictions_b.keys() - predictions_a.keys()
    differences = []
    if only_in_a:
        differences.append(f"{len(only_in_a)} only in {a}, such as {min(only_in_a)}")
    if only_in_b:
        differences.append(f"{len(only_in_b)} only in {b}, such as {min(only_in_b)}")
    if differences:
        raise R3LiteError(
            f"the evaluations have different questions: {' and '.join(differences)}", remedy, code="questions-differ"
        )
    changed = [id for id, (text, _) in predictions_a.items() if text != predictions_b[id][0]]
    if changed:
        cause = f"{len(changed)} ids, such as {changed[0]}, belong to different questions in {a} and {b}"
        raise R3LiteError(cause, remedy, code="ids-differ")
