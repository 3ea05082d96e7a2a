"""What a run learns from: --data, or several [[sources]] with a weight, a type and a step format each.

Rows and questions know the name of their source; it is empty for those of --data.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from r3lite.core.config import UsageError
from r3lite.core.episode import Question
from r3lite.core.errors import R3LiteError
from r3lite.core.records import Record
from r3lite.datasets.conversations import KNOWN_LAYOUTS, LAYOUTS, Conversation, layout_of, read_conversation
from r3lite.datasets.order import Mixture, hold_out
from r3lite.datasets.qa import ANSWERS, plain_answers, read_questions
from r3lite.datasets.rows import Item, converted_rows
from r3lite.datasets.splits import new_questions, without
from r3lite.datasets.trajectories import (
    Example,
    Row,
    Rows,
    encode_row,
    encode_rows,
    parts_of,
    read_rows,
    row_from_json,
)
from r3lite.protocols.base import Protocol
from r3lite.protocols.chat import Chat, ThinkingChat
from r3lite.protocols.registry import build_protocol
from r3lite.protocols.transcript import Layout
from r3lite.settings import DataSettings, NewQuestionSettings, ProtocolSettings, SftConfig, SourceSettings
from r3lite.settings.data import SourceEntry

CALL = "<functioncall>"  # stands before a call in glaive-function-calling-v2


def entries_of(data: DataSettings, mixture: SourceSettings) -> tuple[SourceEntry, ...]:
    """The sources; none if there is --data alone. Raises UsageError for both."""
    if data.data and mixture.sources:
        raise UsageError("--data and [[sources]] are both given: pass one (--sources none unsets those of a file)")
    return mixture.sources or ()


def has_steps(entry: SourceEntry) -> bool:
    """Whether a source is of questions that are answered in steps, by its type."""
    return entry.get("type", "qa") == "qa"


def protocols_of(settings: ProtocolSettings, mixture: SourceSettings) -> dict[str, Protocol]:
    """The protocol of each source by its name; under the empty name that of --format.

    The prompt files of the settings belong to --format: a source of another one has those that are shipped.
    """
    found: dict[str, Protocol] = {"": build_protocol(settings)}
    for entry in mixture.sources or ():
        own = entry.get("format", settings.format)
        if not has_steps(entry):
            found[entry["name"]] = (ThinkingChat if entry["type"] == "r1" else Chat)(settings.system_prompt)
        elif own == settings.format:
            found[entry["name"]] = found[""]
        else:
            found[entry["name"]] = build_protocol(replace(settings, format=own, init_prompt=None, step_prompt=None))
    return found


def build_mixture(mixture: SourceSettings, items: Sequence[Row | Question], seed: str) -> Mixture | None:
    """How rows or questions are drawn, which are in the order of their sources; None without sources."""
    if not mixture.sources:
        return None
    counts = Counter(item.source for item in items)
    sizes = [counts[entry["name"]] for entry in mixture.sources]
    return Mixture(sizes, [entry["weight"] for entry in mixture.sources], seed)


def read_rows_of(data: DataSettings, mixture: SourceSettings, protocols: Mapping[str, Protocol]) -> Rows:
    """The SFT rows of each source, the first --limit of each; bad ones are treated as by `read_rows`."""
    entries = entries_of(data, mixture)
    if not entries:
        return {"": read_rows(data.data, protocols[""], data.limit, data.skip_bad_rows)}
    return {entry["name"]: _rows(entry, data, protocols[entry["name"]]) for entry in entries}


def read_data(config: SftConfig) -> tuple[dict[str, Protocol], Rows, Rows]:
    """The protocols, with their prompt files read, rows to train on and rows held out: each by the names of sources."""
    protocols = protocols_of(config.protocol, config.mixture)
    rows = read_rows_of(config.data, config.mixture, protocols)
    return protocols, *hold_out(rows, config.sft.validation_fraction, config.sft.validation_rows, config.common.seed)


def _rows(entry: SourceEntry, data: DataSettings, protocol: Protocol) -> list[Example]:
    kind = entry.get("type")  # without one, any row is taken

    def convert(row: Record, id: str) -> Example:
        problem = "a trajectory"
        if has_steps(entry) or "steps" not in row:
            made = row_from_json(row, protocol, id)
            if kind == "qa" and isinstance(made, Conversation):
                problem = "a conversation"
            elif kind == "r1" and not any(
                "</think>" in m["content"] for m in made.messages if m["role"] == "assistant"
            ):
                problem = "no assistant message with a thought that ends with </think>"
            else:
                return made
        raise row.error(f"{problem}, but the type of the source is {kind}")

    return _converted(entry, data, convert)


def encode_rows_of(rows: Rows, layouts: Mapping[str, Layout]) -> list[Row]:
    """The rows of all sources in tokens, source after source; prints how many of each are left out."""
    if empty := [name for name, some in rows.items() if not some]:
        cause = f"the source {empty[0]} has no rows left to train on: all are held out for validation"
        raise R3LiteError(cause, "Lower --validation-fraction or --validation-rows, or remove the source.")
    return [
        replace(row, source=name)
        for name, some in rows.items()
        for row in encode_rows(some, layouts[name], f"the source {name}: " if name else "")
    ]


def encode_fitting(rows: Rows, layouts: Mapping[str, Layout]) -> list[Row]:
    """The same, silently, and none if none fits."""
    pairs = [
        (name, encode_row(part, layouts[name]))
        for name, some in rows.items()
        for row in some
        for part in parts_of(row, layouts[name])
    ]
    return [replace(row, source=name) for name, row in pairs if row is not None]


def read_questions_of(data: NewQuestionSettings, mixture: SourceSettings) -> list[Question]:
    """The questions of all sources, source after source, the first --limit of each; ids are `NAME/ID`."""
    entries = entries_of(data, mixture)
    if not entries:
        return new_questions(data)
    found = []
    for entry in entries:
        name = entry["name"]
        some = without(_questions(entry, data), data.exclude, data.skip_bad_rows)
        if twice := [id for id, times in Counter(q.id for q in some).items() if times > 1]:
            raise R3LiteError(f"the source {name}: duplicate id {twice[0]!r}", "Make the ids unique.")
        found += [replace(question, id=f"{name}/{question.id}", source=name) for question in some]
    return found


def _questions(entry: SourceEntry, data: DataSettings) -> list[Question]:
    kind = entry.get("type", "qa")
    if kind != "qa":
        return _converted(entry, data, lambda row, id: task_from_row(row, kind, id))
    with _named(entry):
        return read_questions(entry["file"], data.limit, data.skip_bad_rows)


def task_from_row(row: Record, kind: str, default_id: str = "") -> Question:
    """What is asked in a row of type chat, coding, function_calling or r1, in its own lines; raises InvalidRecord.

    A conversation asks for its last reply, or for the first that calls a function; the messages before are given. Of a
    reply of type r1 what follows the thought is the gold answer. A row of `question` and `answer` is asked as it is.
    """
    id = row.identifier("id", default_id)
    keys = layout_of(row)
    asks = LAYOUTS[keys].asks if keys else ("question", *ANSWERS)
    if asks and asks[0] in row:
        return Question(id, row.text(asks[0]), plain_answers(row, *asks[1:]), type=kind)
    if not keys:
        raise row.error(f"has neither 'question' and 'answer' nor the keys of a conversation ({KNOWN_LAYOUTS})")
    conversation = read_conversation(row, id, keys)
    messages = conversation.messages
    if conversation.has_tools:
        raise row.error("has tools, which only sft supports")
    replies = [i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("train", True)]
    if kind == "function_calling":
        replies = [i for i in replies if messages[i]["content"].lstrip().startswith(CALL)][:1]
        if not replies:
            raise row.error(f"no message of the assistant calls a function ({CALL})")
    *earlier, reply = messages[: replies[-1] + 1]
    if not earlier or earlier[-1]["role"] != "user":
        raise row.error("the reply to learn does not follow a user message")
    *earlier, asked = earlier
    answer = reply["content"]
    if kind == "r1":
        _, thought, answer = answer.rpartition("</think>")
        if not thought or not answer.strip():
            raise row.error("the reply to learn has no answer after </think>")
    return Question(id, asked["content"], (answer.strip(),), type=kind, earlier=tuple(earlier))


def _converted(entry: SourceEntry, data: DataSettings, convert: Callable[[Record, str], Item]) -> list[Item]:
    """The rows of a source's file as `convert` makes them of each and of the id it has if it names none."""
    with _named(entry):
        needed = "row", "Pass another file, or remove the source."
        return converted_rows(entry["file"], convert, data.limit, data.skip_bad_rows, *needed)


@contextlib.contextmanager
def _named(entry: SourceEntry) -> Iterator[None]:
    """Within the `with` block an error says which source it is about."""
    try:
        yield
    except R3LiteError as error:
        raise R3LiteError(f"the source {entry['name']}: {error.cause.removeprefix('--data ')}", error.remedy) from error


def table(mixture: SourceSettings, settings: ProtocolSettings, counts: Mapping[str, int]) -> str:
    """The sources with their shares of the draws and `counts` of their rows, for --dry-run; nothing without any."""
    entries = mixture.sources or ()
    total, width = sum(entry["weight"] for entry in entries), max((len(entry["name"]) for entry in entries), default=0)
    lines = ["Sources: share of the samples, type, format and rows"] if entries else []
    for entry in entries:
        name, steps = entry["name"], entry.get("format", settings.format) if has_steps(entry) else "chat"
        share, kind = entry["weight"] / total, entry.get("type", "any")
        lines.append(f"  {name:<{width}}  {share:6.1%}  {kind:<16}  {steps:<8}  {counts[name]:>7} of {entry['file']}")
    return "\n".join([*lines, "", ""]) if entries else ""


def missing_of(data: DataSettings, mixture: SourceSettings) -> str | None:
    """The first of the files that is not on this machine, such as a hub string; --data if nothing is named."""
    files = [entry["file"] for entry in entries_of(data, mixture)] or [data.data]
    return next((file or "--data" for file in files if not file or not Path(file).exists()), None)
