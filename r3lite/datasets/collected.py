"""The counts of `collect`, and its files that a later run goes on with: the output, the rejections, the settings."""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from r3lite.core.earlier_output import refuse_another_run, refuse_other_inputs
from r3lite.core.episode import Question, Step
from r3lite.core.errors import R3LiteError, explained
from r3lite.core.files import check_writable, read_jsonl, recover_jsonl, write_jsonl, write_text
from r3lite.core.records import parse

MORE = ("limit", "skip_bad_rows")  # settings with which a run may go on: they add questions
INPUTS = "# inputs: "
# The keys of a record in the file of rejections, by --source. With `self`, every question that is done has a record,
# whose reasons are those of its rejected episodes.
REJECTIONS = {
    "gold": {"id", "reason", "source"},
    "teacher": {"id", "reason"},
    "self": {"id", "reasons"},
}


@dataclass(frozen=True)
class Earlier:
    """The records of earlier runs into the same file: trajectories, and what the runs rejected."""

    accepted: list[dict]
    rejected: list[dict]


@dataclass
class Tally:
    """Counts of the questions: kept, rejected for what reason, and what their trajectories hold."""

    questions: int
    accepted: int = 0
    accepted_earlier: int = 0  # by runs that this one continues
    rejected: Counter = field(default_factory=Counter)  # reason -> questions, or episodes of the model itself
    rejections: list[dict] = field(default_factory=list)  # of gold trajectories: records of the rejected questions
    steps: int = 0  # of kept trajectories
    gold: int = 0  # gold paragraphs that they need
    retrieved_gold: int = 0  # those of them that the retriever found itself
    extra: dict[str, object] = field(default_factory=dict)

    def keep(self, steps: int, gold: int, retrieved_gold: int) -> None:
        """Counts a trajectory with its steps, its gold paragraphs, and those of them that were retrieved."""
        self.accepted += 1
        self.steps += steps
        self.gold += gold
        self.retrieved_gold += retrieved_gold

    def reject(self, question: Question, reason: str) -> None:
        self.rejected[reason] += 1
        self.rejections.append({"id": question.id, "reason": reason, "source": "gold"})

    def keep_retrieved(self, question: Question, steps: Sequence[Step]) -> None:
        """Counts a trajectory of which all documents were retrieved."""
        documents = [document for step in steps for document in step.documents]
        retrieved_gold = question.gold_found(documents)
        self.keep(steps=len(steps), gold=len(question.gold), retrieved_gold=len(retrieved_gold))

    def table(self) -> str:
        """Returns the counts as lines of a name and a value."""
        mean_steps = "-"
        if self.accepted:
            mean_steps = f"{self.steps / self.accepted:.2f}"
        share_of_gold = "-"
        if self.gold:
            share_of_gold = f"{self.retrieved_gold / self.gold:.3f}"
        rows: list[tuple[str, object]] = [("questions", self.questions), ("trajectories kept", self.accepted)]
        rows += [(f"rejected: {reason}", count) for reason, count in self.rejected.most_common()]
        rows.append(("mean steps", mean_steps))
        rows.append(("gold paragraphs found", share_of_gold))
        rows += self.extra.items()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def questions_of(output: Path) -> Path:
    """Returns the file of the questions that `collect --source documents` makes to train on."""
    return output.with_name(f"{output.stem}.questions.jsonl")


def held_out_of(output: Path) -> Path:
    """Returns the file of the questions that `collect --source documents` makes to test on."""
    return output.with_name(f"{output.stem}.test.jsonl")


def rejections_of(output: Path) -> Path:
    return output.with_name(f"{output.name}.rejected.jsonl")


def config_of(output: Path) -> Path:
    return output.with_name(f"{output.name}.config.toml")


def ids(records: list[dict]) -> set[str]:
    return {str(record["id"]) for record in records}


def write_questions(path: Path, rows: list[dict]) -> None:
    """Writes rows of questions that were made. Raises R3LiteError if the file already holds other rows.

    It may hold the same rows: a run that was killed before it wrote its trajectories leaves them.
    """
    remedy = "Pass another --output, or delete it."
    if _has_content(path) and [record.values for record in read_jsonl(path, remedy)] != rows:
        raise R3LiteError(f"{path} exists and is not empty", remedy, code="output-not-empty")
    write_jsonl(path, rows)


def rejected_ids(output: Path) -> set[str]:
    """Returns the ids of the questions that `collect` rejected when it wrote a file; none if that is not known."""
    path = rejections_of(output)
    with contextlib.suppress(R3LiteError):
        if path.is_file():
            return {str(record.values["id"]) for record in read_jsonl(path) if "id" in record}
    return set()


def read_earlier(output: Path, source: str, config: Any) -> Earlier:
    """Returns the records of earlier runs into the same file.

    Raises R3LiteError for a file that this run may not go on writing. Gold trajectories, also of questions made from
    documents, are written all at once, so a file that is not empty is of another run. Runs with other sources continue
    only a file of their own: `<output>.config.toml` has the settings of the latest run into it.
    """

    check_earlier(output, source, config)
    if source == "documents":
        source = "gold"

    def is_kept(record: dict) -> bool:
        return "id" in record and "steps" in record and record.get("source") == source

    def is_rejected(record: dict) -> bool:
        return record.keys() == REJECTIONS[source] and isinstance(record.get("reasons", {}), dict)

    if source == "gold":
        recover_jsonl(rejections_of(output), is_rejected, "collect --source gold", confirmed=False)
        return Earlier([], [])
    rejections = rejections_of(output)
    is_continued = _is_continued(output)
    command = f"collect --source {source}"
    return Earlier(
        recover_jsonl(output, is_kept, command, confirmed=is_continued),
        recover_jsonl(rejections, is_rejected, command, confirmed=is_continued),
    )


def check_earlier(output: Path, source: str, config: Any) -> None:
    """Raises R3LiteError for a file of an earlier run that this one may not go on writing, by its size or settings."""
    if source in ("gold", "documents"):
        if _has_content(output):
            raise R3LiteError(
                f"--output {output} exists and is not empty", "Pass a new file, or delete it.", code="output-not-empty"
            )
    elif _is_continued(output):
        refuse_another_run(config_of(output), "collect", config, output=output, free=MORE)


def _is_continued(output: Path) -> bool:
    """Returns whether an earlier run has begun to write a file that a later one may go on with."""
    return config_of(output).exists() and (_has_content(output) or _has_content(rejections_of(output)))


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def go_on(output: Path, earlier: Earlier, settings: str, inputs: dict[str, str]) -> None:
    """Writes the settings of a run beside its output, with the fingerprints of what it reads as a comment.

    Raises R3LiteError if earlier runs, whose trajectories are there, have read something else.
    """
    path = config_of(output)
    if path.exists() and (earlier.accepted or earlier.rejected):
        lines = path.read_text(encoding="utf-8").splitlines()
        input_lines = [line for line in lines if line.startswith(INPUTS)]
        inputs_of_earlier = {}
        if input_lines:
            inputs_of_earlier = parse(input_lines[-1].removeprefix(INPUTS))
        refuse_other_inputs(inputs_of_earlier, inputs, "Restore it, or pass another --output.")
    write_text(path, f"{settings}{INPUTS}{json.dumps(inputs)}\n")


def check_output(output: Path, config: Any) -> None:
    """Refuses, before any question is read, an output that is also an input, is not a file, or cannot be written."""
    remedy = "Pass a new file that ends in .jsonl."
    inputs = [("--data", config.data.data), ("--corpus", config.retrieval.corpus)]
    inputs += [("--exclude", path) for path in config.data.exclude or ()]
    with explained(OSError, f"--output {output} cannot be written", "Pass another file.", code="output-unwritable"):
        for flag, path in inputs:
            if path and output.exists() and Path(path).exists() and output.samefile(path):
                raise R3LiteError(f"--output {output} is also the file of {flag}", remedy, code="output-is-input")
        if output.exists() and not output.is_file():
            kind = "device"
            if output.is_dir():
                kind = "folder"
            raise R3LiteError(f"--output {output} is a {kind}", remedy, code="not-a-file")
        check_writable(Path(os.path.realpath(output)).parent)
        if output.exists():
            open(output, "ab").close()
