"""The counts of `collect`, and the files by which a later run continues: output, rejections and settings."""

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

MAY_DIFFER = ("limit", "skip_bad_rows")  # settings that may differ from the earlier run's: they only add questions
INPUTS_COMMENT = "# inputs: "  # in the file of settings; the fingerprints of the inputs follow as JSON
# The keys of a record in the file of rejections, by --source. With `self`, every question that is done has a record;
# `reasons` says how many of its episodes were rejected for each reason.
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
    """Counts of the questions that are kept or rejected, and of what the kept trajectories hold."""

    questions: int
    accepted: int = 0
    accepted_earlier: int = 0  # by runs that this one continues
    rejected: Counter = field(default_factory=Counter)  # by reason: questions; with --source self, episodes
    rejections: list[dict] = field(default_factory=list)  # of gold trajectories: records of the rejected questions
    steps: int = 0  # of kept trajectories
    gold: int = 0  # gold paragraphs that the kept trajectories need
    retrieved_gold: int = 0  # gold paragraphs among them that the retriever found
    extra: dict[str, object] = field(default_factory=dict)  # further lines of the table: name -> value

    def keep(self, steps: int, gold: int, retrieved_gold: int) -> None:
        """Counts a trajectory; the arguments count its steps, its gold paragraphs and those that were retrieved."""
        self.accepted += 1
        self.steps += steps
        self.gold += gold
        self.retrieved_gold += retrieved_gold

    def reject(self, question: Question, reason: str) -> None:
        self.rejected[reason] += 1
        self.rejections.append({"id": question.id, "reason": reason, "source": "gold"})

    def keep_retrieved(self, question: Question, steps: Sequence[Step]) -> None:
        """Counts a trajectory all of whose documents were retrieved, none inserted."""
        documents = [document for step in steps for document in step.documents]
        retrieved_gold = question.gold_indices(documents)
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
    """Returns the records of earlier runs into the same file, and removes unfinished last lines from their files.

    Raises R3LiteError for a file that this run may not go on writing. Gold trajectories, also of questions made from
    documents, are written all at once, so a file that is not empty is of another run. Runs with other sources continue
    a file only if `<output>.config.toml` is beside it, which has the settings of the latest run into the file.
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
    """Raises R3LiteError if this run may not write to a file.

    With --source gold or documents the file must be empty. With other sources an earlier run into the file must have
    had the same settings except MAY_DIFFER.
    """
    if source in ("gold", "documents"):
        if _has_content(output):
            raise R3LiteError(
                f"--output {output} exists and is not empty", "Pass a new file, or delete it.", code="output-not-empty"
            )
    elif _is_continued(output):
        refuse_another_run(config_of(output), "collect", config, output=output, free=MAY_DIFFER)


def _is_continued(output: Path) -> bool:
    """Returns whether an earlier run has written trajectories or rejections, and has left its settings."""
    return config_of(output).exists() and (_has_content(output) or _has_content(rejections_of(output)))


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def write_settings(output: Path, earlier: Earlier, settings: str, inputs: dict[str, str]) -> None:
    """Writes the settings of a run beside its output, with the fingerprints of its `inputs` as a comment.

    Raises R3LiteError if there are trajectories or rejections of earlier runs that have read other inputs.
    """
    path = config_of(output)
    if path.exists() and (earlier.accepted or earlier.rejected):
        lines = path.read_text(encoding="utf-8").splitlines()
        input_lines = [line for line in lines if line.startswith(INPUTS_COMMENT)]
        inputs_of_earlier = {}
        if input_lines:
            inputs_of_earlier = parse(input_lines[-1].removeprefix(INPUTS_COMMENT))
        refuse_other_inputs(inputs_of_earlier, inputs, "Restore it, or pass another --output.")
    write_text(path, f"{settings}{INPUTS_COMMENT}{json.dumps(inputs)}\n")


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
            open(output, "ab").close()  # raises OSError if the file is read-only
