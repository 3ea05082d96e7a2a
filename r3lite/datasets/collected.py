"""What `collect` counts, and its files that a later run goes on with: the output, what was rejected, the settings."""

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
from r3lite.core.files import check_writable, read_jsonl, recover_jsonl, write_text
from r3lite.core.records import parse

MORE = ("limit", "skip_bad_rows")  # settings with which a run may go on: they add questions
INPUTS = "# inputs: "
# What a run writes of the questions that it rejects, or of which it rejects some episodes, by --source.
REJECTIONS = {"gold": {"id", "reason", "source"}, "teacher": {"id", "reason"}, "self": {"id", "reasons"}}


@dataclass(frozen=True)
class Earlier:
    """What earlier runs into the same file have written: trajectories, and records of what they rejected."""

    kept: list[dict]
    rejected: list[dict]


@dataclass
class Tally:
    """Counts of the questions: kept, rejected for what reason, and what their trajectories hold."""

    questions: int
    kept: int = 0
    kept_earlier: int = 0  # by runs that this one continues
    rejected: Counter = field(default_factory=Counter)  # reason -> questions, or episodes of the model itself
    rejections: list[dict] = field(default_factory=list)  # of gold trajectories: records of the rejected questions
    steps: int = 0  # of kept trajectories
    gold: int = 0  # gold paragraphs that they need
    found: int = 0  # of those, how many the retriever found itself
    extra: dict[str, object] = field(default_factory=dict)

    def keep(self, steps: int, gold: int, found: int) -> None:
        self.kept, self.steps = self.kept + 1, self.steps + steps
        self.gold, self.found = self.gold + gold, self.found + found

    def reject(self, question: Question, reason: str) -> None:
        self.rejected[reason] += 1
        self.rejections.append({"id": question.id, "reason": reason, "source": "gold"})

    def keep_retrieved(self, question: Question, steps: Sequence[Step]) -> None:
        """Counts a trajectory of which all documents were retrieved."""
        documents = [d for step in steps for d in step.documents]
        self.keep(len(steps), len(question.gold), len(question.gold_found(documents)))

    def table(self) -> str:
        rows = [("questions", self.questions), ("trajectories kept", self.kept)]
        rows += [(f"rejected: {reason}", n) for reason, n in self.rejected.most_common()]
        rows.append(("mean steps", f"{self.steps / self.kept:.2f}" if self.kept else "-"))
        rows.append(("gold paragraphs found", f"{self.found / self.gold:.3f}" if self.gold else "-"))
        rows += self.extra.items()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def rejections_of(output: Path) -> Path:
    return output.with_name(f"{output.name}.rejected.jsonl")


def config_of(output: Path) -> Path:
    return output.with_name(f"{output.name}.config.toml")


def ids(records: list[dict]) -> set[str]:
    return {str(record["id"]) for record in records}


def rejected_ids(output: Path) -> set[str]:
    """The ids of the questions that `collect` rejected when it wrote a file; none if that is not known."""
    path = rejections_of(output)
    with contextlib.suppress(R3LiteError):
        if path.is_file():
            return {str(record.values["id"]) for record in read_jsonl(path) if "id" in record}
    return set()


def read_earlier(output: Path, source: str, config: Any) -> Earlier:
    """What an earlier run into the same file has done. Refuses a file that this run may not go on writing.

    Gold trajectories are written all at once, so a file with anything in it is not this run's. Other runs go on with
    their own file only: the settings that they had are kept in `<output>.config.toml`.
    """

    def is_kept(record: dict) -> bool:
        return "id" in record and "steps" in record and record.get("source") == source

    def is_rejected(record: dict) -> bool:
        return record.keys() == REJECTIONS[source] and isinstance(record.get("reasons", {}), dict)

    if source == "gold":
        if output.exists() and output.stat().st_size:
            raise R3LiteError(f"--output {output} exists and is not empty", "Pass a new file, or delete it.")
        recover_jsonl(rejections_of(output), is_rejected, "collect --source gold", confirmed=False)
        return Earlier([], [])
    settings, files = config_of(output), (output, rejections_of(output))
    if known := settings.exists() and any(path.exists() and path.stat().st_size for path in files):
        refuse_another_run(settings, "collect", config, output, MORE)
    pairs = zip(files, (is_kept, is_rejected), strict=True)
    return Earlier(*(recover_jsonl(path, ours, f"collect --source {source}", known) for path, ours in pairs))


def go_on(output: Path, earlier: Earlier, settings: str, inputs: dict[str, str]) -> None:
    """Keeps the settings of a run beside its output, with the fingerprints of what it reads as a comment.

    Raises R3LiteError if earlier runs, whose trajectories are there, have read something else.
    """
    kept = config_of(output)
    if kept.exists() and (earlier.kept or earlier.rejected):
        noted = [line for line in kept.read_text(encoding="utf-8").splitlines() if line.startswith(INPUTS)]
        then = parse(noted[-1].removeprefix(INPUTS)) if noted else {}
        refuse_other_inputs(then, inputs, "Restore it, or pass another --output.")
    write_text(kept, f"{settings}{INPUTS}{json.dumps(inputs)}\n")


def check_output(output: Path, config: Any) -> None:
    """Refuses, before any question is read, an output that is an input, no file, or cannot be written."""
    remedy = "Pass a new file that ends in .jsonl."
    inputs = [("--data", config.data.data), ("--corpus", config.retrieval.corpus)]
    inputs += [("--exclude", file) for file in config.data.exclude or ()]
    with explained(OSError, f"--output {output} cannot be written", "Pass another file."):
        for flag, given in inputs:
            if given and output.exists() and Path(given).exists() and output.samefile(given):
                raise R3LiteError(f"--output {output} is also the file of {flag}", remedy)
        if output.exists() and not output.is_file():
            raise R3LiteError(f"--output {output} is a {'folder' if output.is_dir() else 'device'}", remedy)
        check_writable(Path(os.path.realpath(output)).parent)
        if output.exists():
            open(output, "ab").close()
