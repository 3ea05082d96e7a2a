"""How much data a run has, in words and as a number, for `--dry-run` and `plan`: nothing is downloaded for it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from r3lite.core.episode import Question
from r3lite.datasets.rl_questions import read_rl_questions
from r3lite.datasets.sources import entries_of, has_steps, read_data
from r3lite.settings import DataSettings, NewQuestionSettings, PpoConfig, ProtocolSettings, SftConfig, SourceSettings


@dataclass(frozen=True)
class Summary:
    """The number of rows or questions that a run learns from, and the same in words."""

    count: int | None = None  # None: no data are named, or a file of them is not here
    text: str = ""
    questions: list[Question] = field(default_factory=list)  # the counted questions of RL; empty for SFT


def summary_of_sft(config: SftConfig) -> Summary:
    """Returns how many rows a run of SFT trains on, and in how many steps."""
    if missing := missing_of(config.data, config.mixture):
        return Summary(text=f"{missing} is not here yet: its rows are not counted")
    if not entries_of(config.data, config.mixture) and not config.data.data:
        return Summary()
    _, training_rows, validation_rows = read_data(config)
    counts = {source: len(rows) for source, rows in training_rows.items()}
    count = sum(counts.values())
    held_out = sum(map(len, validation_rows.values()))
    text = table(config.mixture, config.protocol, counts)
    text += f"{count} rows, {held_out} more held out; {config.steps(count)} steps of {config.rows_per_step} rows"
    return Summary(count, text)


def summary_of_rl(config: PpoConfig) -> Summary:
    """Returns how many questions a run of RL has, and how many rounds."""
    if missing := missing_of(config.data, config.mixture, config.rl.contexts or ()):
        return Summary(text=f"{missing} is not here yet: its questions are not counted")
    if not entries_of(config.data, config.mixture) and not config.data.data:
        return Summary()
    questions, _ = read_rl_questions(config)
    count = len(questions)
    text = table(config.mixture, config.protocol, Counter(question.source for question in questions))
    rounds = config.rounds(count)
    noun = "rounds"
    if rounds == 1:
        noun = "round"
    text += f"{count} questions; {rounds} {noun} of {config.rl.batch_size}"
    return Summary(count, text, questions)


def table(mixture: SourceSettings, settings: ProtocolSettings, counts: Mapping[str, int]) -> str:
    """Returns the sources as text, with their shares of the draws and the `counts` of rows; "" without sources."""
    entries = mixture.sources or ()
    if not entries:
        return ""
    total = sum(entry["weight"] for entry in entries)
    width = max(len(entry["name"]) for entry in entries)
    lines = ["Sources: share of the samples, type, format and rows"]
    for entry in entries:
        name = entry["name"]
        share = entry["weight"] / total
        kind = entry.get("type", "any")
        format = "chat"
        if has_steps(entry):
            format = entry.get("format", settings.format)
        lines.append(f"  {name:<{width}}  {share:6.1%}  {kind:<16}  {format:<8}  {counts[name]:>7} of {entry['file']}")
    return "\n".join([*lines, "", ""])


def missing_of(data: DataSettings, mixture: SourceSettings, contexts: Sequence[str] = ()) -> str | None:
    """Returns the first of a run's files that is not on this machine (a hub string never is); None if all are here.

    `contexts` are the files of --contexts.
    """
    paths = [entry["file"] for entry in entries_of(data, mixture)]
    if data.data:
        paths.append(data.data)
    if isinstance(data, NewQuestionSettings):
        paths += data.exclude or ()
    paths += contexts
    for path in paths:
        if not Path(path).exists():
            return path
    return None
