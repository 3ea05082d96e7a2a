"""SFT rows: step-by-step trajectories and plain conversations, read from files and made into tokens with a loss mask.

A trajectory becomes the tokens that a rollout with the same texts has, because the same code lays out both. Loss falls
on the text of the assistant and on the token that ends its turn, never on prompts or documents. Knows neither models
nor how trajectories are made.
"""

import contextlib
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from r3lite.core.episode import Question, Step
from r3lite.core.errors import R3LiteError
from r3lite.core.records import Record
from r3lite.core.token_record import TokenRecord
from r3lite.datasets.conversations import (
    KNOWN_LAYOUTS,
    LAYOUTS,
    Conversation,
    is_trained,
    layout_of,
    read_conversation,
)
from r3lite.datasets.rows import converted_rows
from r3lite.models.packing import common_prefix
from r3lite.protocols.base import Protocol
from r3lite.protocols.chat import ThinkingChat
from r3lite.protocols.layout import Layout
from r3lite.protocols.observations import LEAST_DOCUMENT
from r3lite.protocols.tool_chats import tool_chat


@dataclass(frozen=True)
class Trajectory:
    """A question answered in well-formed steps: the last has the answer, all others queries with their documents."""

    id: str
    question: str
    answers: tuple[str, ...]
    steps: tuple[Step, ...]
    source: str = ""

    @staticmethod
    def of(question: Question, steps: Iterable[Step], source: str) -> "Trajectory":
        """Returns the trajectory of a data set's question."""
        return Trajectory(
            id=question.id,
            question=question.text,
            answers=question.answers,
            steps=tuple(steps),
            source=source,
        )

    def to_json(self) -> dict:
        steps = [step.to_json() for step in self.steps]
        return vars(self) | {"answers": list(self.answers), "steps": steps}


Example = Trajectory | Conversation
ExamplesBySource = dict[str, list[Example]]  # by the names of their sources


@dataclass(kw_only=True)
class Row(TokenRecord):
    """An SFT row in tokens; the loss falls on the tokens that `action_mask` marks."""

    shortened: bool = False  # whether documents were cut below `max_document_tokens` so that the row fits
    source: str = ""  # the name of the row's source, if there are several sources

    @property
    def loss_tokens(self) -> int:
        """The number of tokens that have loss. The first token of a row has none: no token before it can predict it."""
        return sum(self.action_mask[1:])


def read_rows(
    data: str | Path, protocol: Protocol, limit: int | None = None, skip_bad_rows: bool = False
) -> list[Example]:
    """Returns the first `limit` rows of a file or hub string: trajectories (`steps`) or conversations of any known
    layout.

    A bad row raises R3LiteError with file, line and reason; with `skip_bad_rows` bad rows are left out and counted.
    """
    return converted_rows(
        data,
        convert=lambda row, id: row_from_json(row, protocol, id),
        limit=limit,
        skip_bad_rows=skip_bad_rows,
        needed="trajectory",
        remedy="Write trajectories with `python -m r3lite.collect`.",
    )


def read_traces(data: str | Path, protocol: Protocol, skip_bad_rows: bool = False) -> list[Trajectory]:
    """Returns a teacher's traces: rows with `steps`, or rows of a question and a reply with a thought, as trajectories.

    Bad rows are treated as by `read_rows`.
    """
    return converted_rows(
        data,
        convert=lambda row, id: trace_from_json(row, protocol, id),
        limit=None,
        skip_bad_rows=skip_bad_rows,
    )


def trace_from_json(row: Record, protocol: Protocol, default_id: str = "") -> Trajectory:
    """Returns the trace of a row; raises InvalidRecord. A reply with a thought becomes a trajectory of one step."""
    id = row.identifier("id", default_id)
    if "steps" in row:
        return _trajectory(row, id, protocol)
    conversation = read_conversation(row, id, _trace_layout(row))
    *system, request, reply = (message["content"] for message in conversation.messages)
    if system:
        raise row.error("has a system message, but traces use the prompt of --format")
    step = _stripped(replace(ThinkingChat().parse(reply, ()), faults=()))
    problem = check_steps((step,), protocol)
    if problem:
        raise row.error(problem)
    return Trajectory(
        id=id,
        question=request.strip(),
        answers=(),
        steps=(step,),
        source=row.text("source", "", blank=True),
    )


def _trace_layout(row: Record) -> tuple[str, ...]:
    """Returns the keys of the first layout of traces whose thought, under the second key, the row has."""
    by_thought = {keys[1]: keys for keys, layout in LAYOUTS.items() if layout.question_and_answer}
    for key, keys in by_thought.items():
        if key in row:
            return keys
    raise row.error(f"has neither 'steps' (a trajectory) nor {', '.join(map(repr, by_thought))} (a thought)")


def row_from_json(row: Record, protocol: Protocol, default_id: str = "") -> Example:
    """Returns the trajectory or conversation of a row; raises InvalidRecord."""
    id = row.identifier("id", default_id)
    keys = layout_of(row, ["steps"])
    if keys:
        return read_conversation(row, id, keys)
    if "steps" in row:
        return _trajectory(row, id, protocol)
    hint = ""
    if "question" in row:
        hint = (
            "; to make trajectories of questions, or of documents (--source documents), run `python -m r3lite.collect`"
        )
    raise row.error(f"has neither 'steps' (a trajectory) nor the keys of a conversation ({KNOWN_LAYOUTS}){hint}")


def _trajectory(row: Record, id: str, protocol: Protocol) -> Trajectory:
    """Returns the trajectory of a row with `steps`; raises InvalidRecord if they cannot be trained on."""
    steps = tuple(_stripped(Step.from_json(record)) for record in row.records("steps"))
    problem = check_steps(steps, protocol)
    if problem:
        raise row.error(problem)
    if isinstance(row.values.get("answers"), str):
        answers = (row.text("answers"),)  # one text is one answer
    else:
        answers = row.texts("answers", ())
    return Trajectory(
        id=id,
        question=row.text("question").strip(),
        answers=answers,
        steps=steps,
        source=row.text("source", "", blank=True),
    )


def _stripped(step: Step) -> Step:
    """Returns the step without white space around its texts."""
    searches = tuple(replace(search, query=search.query.strip()) for search in step.searches)
    answer = step.answer
    if answer is not None:
        answer = answer.strip()
    return replace(
        step,
        analysis=step.analysis.strip(),
        searches=searches,
        answer=answer,
        verification=step.verification.strip(),
    )


def check_steps(steps: Sequence[Step], protocol: Protocol) -> str | None:
    """Returns why steps cannot be trained on; None if they can.

    Each step must be the same after it is rendered and parsed; the last one, and no other, must answer.
    """
    if not steps:
        return "no steps"
    for number, step in enumerate(steps, 1):
        if step.searches and not protocol.can_search:
            return f"step {number} has a query, but --format is a format without search"
        text = protocol.render(step, number)
        parsed = protocol.parse(text, steps[: number - 1])
        faults = step.faults or parsed.faults
        if step.searches and step.answer is not None:
            faults = ("query_and_answer",)
        if faults:
            return f"step {number} {protocol.faults.get(faults[0], faults[0])}"
        # Queries and texts are compared, not steps: --format may write more than a step of another format has, such as
        # a plan of its queries.
        if parsed.queries != step.queries or protocol.render(parsed, number) != text:
            return f"step {number} changes when it is written in --format and parsed"
        if number < len(steps) and step.answer is not None:
            return f"step {number} answers, but is not the last"
    if steps[-1].answer is None:
        return "the last step does not answer"
    return None


def parts_of(row: Example, layout: Layout) -> list[Example]:
    """Returns the parts of a row to train on. In them each trained reply follows the prompt that a model would get.

    A chat template may remove the thought of a reply once a later turn follows. For each such reply one part ends with
    the reply, so that it is trained with its thought; one more part is the whole row, for the other replies. Every
    trained reply is trained on in one of the parts.
    """
    if not isinstance(row, Conversation) or row.has_tools:
        return [row]
    with _named(row):
        changed = layout.tokenizer.rewritten_replies(row.messages)
    parts: list[Example] = []
    has_unchanged = False
    for number, message in enumerate(row.messages):
        if not is_trained(message):
            continue
        if number not in changed:
            has_unchanged = True
            continue
        earlier = [{**message, "train": False} for message in row.messages[:number]]
        parts.append(replace(row, messages=(*earlier, message)))
    if has_unchanged:
        parts.append(row)
    return parts


@contextlib.contextmanager
def _named(row: Conversation) -> Iterator[None]:
    """Errors within the `with` block name the row."""
    try:
        yield
    except R3LiteError as error:
        raise R3LiteError(f"row {row.id}: {error.cause}", error.remedy, code=error.code) from error


def encode_row(row: Example, layout: Layout) -> Row | None:
    """Returns a row in tokens; None if it is longer than `max_length`.

    Documents are cut to `max_document_tokens`. While the row is too long, this limit is halved, though not below
    LEAST_DOCUMENT tokens. Question, steps and answer are never cut.
    """
    lengths = layout.lengths
    if isinstance(row, Conversation):
        with _named(row):
            if row.has_tools:
                tokens, mask = tool_chat(layout.tokenizer, row.messages, row.tools)
            else:
                tokens, mask = layout.tokenizer.chat(row.messages)
        if len(tokens) > lengths.max_length:
            return None
        return Row(tokens=tokens, action_mask=mask)
    question = Question(row.id, row.question, row.answers)
    limit = lengths.max_document_tokens
    while True:
        transcript = layout.lay_out(question, row.steps, limit)
        if len(transcript.tokens) <= lengths.max_length:
            is_shortened = limit < lengths.max_document_tokens
            return Row(
                tokens=transcript.tokens,
                action_mask=transcript.action_mask,
                shortened=is_shortened,
            )
        limit //= 2
        if limit < LEAST_DOCUMENT:
            return None


def encode_rows(rows: Sequence[Example], layout: Layout, where: str = "") -> list[Row]:
    """Returns all rows, or parts of rows (`parts_of`), that fit into `max_length`.

    Prints the number of parts, if it is larger than that of the rows, and how many parts were shortened and left out;
    `where` begins these lines. Raises R3LiteError if no part fits.
    """
    parts = [part for row in rows for part in parts_of(row, layout)]
    if len(parts) > len(rows):
        reason = "the chat template removes the thoughts of earlier replies"
        print(f"{where}{len(rows)} rows are trained on as {len(parts)}: {reason}", file=sys.stderr)
    encoded = []
    for part in tqdm(parts, f"{where}tokenizing", unit="row", disable=None):
        row = encode_row(part, layout)
        if row is not None:
            encoded.append(row)
    max_length = layout.lengths.max_length
    shortened = sum(row.shortened for row in encoded)
    too_long = len(parts) - len(encoded)
    if shortened:
        print(f"{where}{shortened} of {len(parts)} rows fit only with shorter documents", file=sys.stderr)
    if too_long:
        print(f"{where}left out {too_long} of {len(parts)} rows, longer than {max_length} tokens", file=sys.stderr)
    if not encoded:
        raise R3LiteError(f"{where}no row fits in {max_length} tokens", "Raise --max-length.", code="no-row-fits")
    assert all(any(row.action_mask) for row in encoded)
    return encoded


def lengths_of(rows: Sequence[Row], held_out: Sequence[Row]) -> dict:
    """Returns four figures: of all rows, the length of the longest (`longest`) and how many first tokens all share in a
    pack (`shared`, see `common_prefix`); of the rows to train on, the mean numbers of tokens (`mean_tokens`) and of
    tokens with loss (`writes`).
    """
    tokens = [row.tokens for row in [*rows, *held_out]]
    return {
        "longest": max(map(len, tokens)),
        "shared": common_prefix(min(tokens), max(tokens)),  # what the first and the last in order share, all share
        "mean_tokens": sum(len(row.tokens) for row in rows) / len(rows),
        "writes": sum(row.loss_tokens for row in rows) / len(rows),
    }


def fingerprint(rows: Sequence[Row]) -> str:
    """Returns the CRC-32 of tokens and masks, so that a run is not resumed on other data under the same name."""
    value = 0
    for row in rows:
        value = zlib.crc32(repr((row.tokens, row.action_mask)).encode(), value)
    return f"{value:08x}"
