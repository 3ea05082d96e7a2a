"""The data that a run learns from: --data, or several [[sources]], each with a weight, a type and a step format.

Rows and questions have the name of their source, which is "" for --data.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from r3lite.core.config import UsageError
from r3lite.core.episode import Question
from r3lite.core.errors import R3LiteError
from r3lite.core.records import Record
from r3lite.datasets.conversations import (
    KNOWN_LAYOUTS,
    LAYOUTS,
    Conversation,
    is_trained,
    layout_of,
    read_conversation,
)
from r3lite.datasets.order import Mixture, hold_out
from r3lite.datasets.qa import ANSWERS, plain_answers, read_questions
from r3lite.datasets.rows import Item, converted_rows
from r3lite.datasets.splits import new_questions, without
from r3lite.datasets.trajectories import (
    Example,
    ExamplesBySource,
    Row,
    encode_row,
    encode_rows,
    parts_of,
    read_rows,
    row_from_json,
)
from r3lite.protocols.base import Protocol
from r3lite.protocols.chat import Chat, ThinkingChat
from r3lite.protocols.layout import Layout
from r3lite.protocols.registry import build_protocol
from r3lite.settings import DataSettings, NewQuestionSettings, ProtocolSettings, SftConfig, SourceSettings
from r3lite.settings.data import SourceEntry

CALL = "<functioncall>"  # stands before a call in glaive-function-calling-v2


def entries_of(data: DataSettings, mixture: SourceSettings) -> tuple[SourceEntry, ...]:
    """Returns the entries of [[sources]]; () if there are none. Raises UsageError if --data is given, too."""
    if data.data and mixture.sources:
        raise UsageError(
            "--data and [[sources]] are both given: pass one (--sources none unsets those of a file)",
            code="data-and-sources",
        )
    return mixture.sources or ()


def has_steps(entry: SourceEntry) -> bool:
    """Returns whether the questions of a source are answered in steps, as they are for type qa, the default."""
    return entry.get("type", "qa") == "qa"


def protocols_of(settings: ProtocolSettings, mixture: SourceSettings) -> dict[str, Protocol]:
    """Returns the protocol of each source by the source's name, and the protocol of --format under the empty name.

    The prompt files of the settings belong to --format: a source of another format has the shipped prompt files.
    """
    of_format = build_protocol(settings)
    protocols: dict[str, Protocol] = {"": of_format}
    for entry in mixture.sources or ():
        format = entry.get("format", settings.format)
        if has_steps(entry):
            protocol = of_format
            if format != settings.format:
                protocol = build_protocol(replace(settings, format=format, init_prompt=None, step_prompt=None))
        elif entry["type"] == "r1":
            protocol = ThinkingChat(settings.system_prompt)
        else:
            protocol = Chat(settings.system_prompt)
        protocols[entry["name"]] = protocol
    return protocols


def build_mixture(mixture: SourceSettings, items: Sequence[Row | Question], seed: str) -> Mixture | None:
    """Returns the mixture from which `items` are drawn; None without sources.

    The items must be in the order of the sources, because the mixture numbers its rows source by source.
    """
    if not mixture.sources:
        return None
    counts = Counter(item.source for item in items)
    sizes = [counts[entry["name"]] for entry in mixture.sources]
    return Mixture(sizes, [entry["weight"] for entry in mixture.sources], seed)


def read_rows_of(data: DataSettings, mixture: SourceSettings, protocols: Mapping[str, Protocol]) -> ExamplesBySource:
    """Returns the SFT rows of each source, the first --limit of each; bad ones are treated as by `read_rows`."""
    entries = entries_of(data, mixture)
    if not entries:
        rows = read_rows(data.data, protocols[""], limit=data.limit, skip_bad_rows=data.skip_bad_rows)
        return {"": rows}
    return {entry["name"]: _rows(entry, data, protocols[entry["name"]]) for entry in entries}


def read_data(config: SftConfig) -> tuple[dict[str, Protocol], ExamplesBySource, ExamplesBySource]:
    """Returns the protocols, with their prompt files read, the rows to train on and the held-out rows: all three by the
    name of the source."""
    protocols = protocols_of(config.protocol, config.mixture)
    rows = read_rows_of(config.data, config.mixture, protocols)
    to_train, to_validate = hold_out(
        rows,
        fraction=config.sft.validation_fraction,
        limit=config.sft.validation_rows,
        seed=config.common.seed,
    )
    return protocols, to_train, to_validate


def _rows(entry: SourceEntry, data: DataSettings, protocol: Protocol) -> list[Example]:
    """Returns the SFT rows of a source; a row that does not suit the type of the source is a bad one."""
    kind = entry.get("type")  # None: the source may have trajectories and conversations of any type

    def convert(row: Record, id: str) -> Example:
        if not has_steps(entry) and "steps" in row:
            raise row.error(f"a trajectory, but the type of the source is {kind}")
        example = row_from_json(row, protocol, id)
        if kind == "qa" and isinstance(example, Conversation):
            raise row.error(f"a conversation, but the type of the source is {kind}")
        if kind == "r1" and not _has_thought(example):
            problem = "no assistant message with a thought that ends with </think>"
            raise row.error(f"{problem}, but the type of the source is {kind}")
        return example

    return _converted(entry, data, convert)


def _has_thought(conversation: Conversation) -> bool:
    """Returns whether a reply of the assistant has the end of a thought."""
    replies = (message["content"] for message in conversation.messages if message["role"] == "assistant")
    return any("</think>" in reply for reply in replies)


def encode_rows_of(rows: ExamplesBySource, layouts: Mapping[str, Layout]) -> list[Row]:
    """Returns the rows of all sources in tokens, source after source; prints how many of each source are left out."""
    for name, of_source in rows.items():
        if not of_source:
            cause = f"the source {name} has no rows left to train on: all are held out for validation"
            raise R3LiteError(
                cause,
                "Lower --validation-fraction or --validation-rows, or remove the source.",
                code="source-all-held-out",
            )
    encoded = []
    for name, of_source in rows.items():
        where = ""
        if name:
            where = f"the source {name}: "
        encoded += [replace(row, source=name) for row in encode_rows(of_source, layouts[name], where)]
    return encoded


def encode_fitting(rows: ExamplesBySource, layouts: Mapping[str, Layout]) -> list[Row]:
    """Returns the same rows as `encode_rows_of`, but prints nothing, and returns no rows if none fits."""
    encoded = []
    for name, of_source in rows.items():
        for example in of_source:
            for part in parts_of(example, layouts[name]):
                row = encode_row(part, layouts[name])
                if row is not None:
                    encoded.append(replace(row, source=name))
    return encoded


def read_questions_of(data: NewQuestionSettings, mixture: SourceSettings) -> list[Question]:
    """Returns the questions of all sources, source after source, the first --limit of each.

    Questions of [[sources]] have the ids `NAME/ID`; those of --data keep their ids.
    """
    entries = entries_of(data, mixture)
    if not entries:
        return new_questions(data)
    questions = []
    for entry in entries:
        name = entry["name"]
        of_source = without(_questions(entry, data), data.exclude, data.skip_bad_rows)
        for id, count in Counter(question.id for question in of_source).items():
            if count > 1:
                raise R3LiteError(
                    f"the source {name}: duplicate id {id!r}", "Make the ids unique.", code="source-duplicate-id"
                )
        questions += [replace(question, id=f"{name}/{question.id}", source=name) for question in of_source]
    return questions


def _questions(entry: SourceEntry, data: DataSettings) -> list[Question]:
    """Returns the questions of a source, with their ids in its file."""
    kind = entry.get("type", "qa")
    if kind != "qa":
        return _converted(entry, data, lambda row, id: task_from_row(row, kind, id))
    with _named(entry):
        return read_questions(entry["file"], data.limit, data.skip_bad_rows)


def task_from_row(row: Record, kind: str, default_id: str = "") -> Question:
    """Returns the question of a row of type chat, coding, function_calling or r1, with its line breaks.

    A row with `question` and `answer`, or with a question and its reasoning (a trace), is asked as it is. In any other
    conversation, the reply to learn is the last one or, for function_calling, the first one that calls a function. The
    question is the user message before the reply; `earlier` has the messages before the question. The gold answer is
    the reply; for r1 it is only the reply's text after the thought. Raises InvalidRecord.
    """
    id = row.identifier("id", default_id)
    layout = layout_of(row)
    question_and_answers = ("question", *ANSWERS)  # keys
    if layout:
        question_and_answers = LAYOUTS[layout].question_and_answer
    if question_and_answers:
        question_key, *answer_keys = question_and_answers
        if question_key in row:
            return Question(id, text=row.text(question_key), answers=plain_answers(row, *answer_keys), type=kind)
    if not layout:
        raise row.error(f"has neither 'question' and 'answer' nor the keys of a conversation ({KNOWN_LAYOUTS})")
    conversation = read_conversation(row, id, layout)
    if conversation.has_tools:
        raise row.error("has tools, which only sft supports")
    *before_reply, reply = _up_to_reply(row, conversation.messages, kind)
    if not before_reply or before_reply[-1]["role"] != "user":
        raise row.error("the reply to learn does not follow a user message")
    *earlier, request = before_reply
    answer = reply["content"]
    if kind == "r1":
        _, thought_end, answer = answer.rpartition("</think>")
        if not thought_end or not answer.strip():
            raise row.error("the reply to learn has no answer after </think>")
    return Question(
        id,
        text=request["content"],
        answers=(answer.strip(),),
        type=kind,
        earlier=tuple(earlier),
    )


def _up_to_reply(row: Record, messages: Sequence[dict], kind: str) -> Sequence[dict]:
    """Returns the messages up to and including the reply to learn (see `task_from_row`)."""
    numbers = [i for i, message in enumerate(messages) if is_trained(message)]
    if kind != "function_calling":
        return messages[: numbers[-1] + 1]
    for i in numbers:
        if messages[i]["content"].lstrip().startswith(CALL):
            return messages[: i + 1]
    raise row.error(f"no message of the assistant calls a function ({CALL})")


def _converted(entry: SourceEntry, data: DataSettings, convert: Callable[[Record, str], Item]) -> list[Item]:
    """Returns the rows of a source's file as `convert(row, default id)` makes them."""
    with _named(entry):
        return converted_rows(
            entry["file"],
            convert,
            limit=data.limit,
            skip_bad_rows=data.skip_bad_rows,
            needed="row",
            remedy="Pass another file, or remove the source.",
        )


@contextlib.contextmanager
def _named(entry: SourceEntry) -> Iterator[None]:
    """Within the `with` block an error says which source it is about."""
    try:
        yield
    except R3LiteError as error:
        cause = error.cause.removeprefix("--data ")
        raise R3LiteError(f"the source {entry['name']}: {cause}", error.remedy, code="bad-source") from error
