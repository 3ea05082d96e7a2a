"""SFT rows: step-by-step trajectories and plain conversations, with the tokens and the mask of their loss.

A trajectory becomes the tokens of the rollout that says the same, laid out by the same code. Loss falls on what the
assistant wrote and on the token that ends its turn, never on prompts or documents. Knows neither models nor how
trajectories were made.
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
from r3lite.datasets.conversations import KNOWN_LAYOUTS, LAYOUTS, Conversation, layout_of, read_conversation
from r3lite.datasets.rows import converted_rows
from r3lite.models.packing import common_prefix
from r3lite.protocols.base import Protocol
from r3lite.protocols.chat import ThinkingChat
from r3lite.protocols.tool_chats import tool_chat
from r3lite.protocols.transcript import LEAST_DOCUMENT, Layout


@dataclass(frozen=True)
class Trajectory:
    """A question answered in well-formed steps; the last one has the answer, all others a query with its documents."""

    id: str
    question: str
    answers: tuple[str, ...]
    steps: tuple[Step, ...]
    source: str = ""

    @staticmethod
    def of(question: Question, steps: Iterable[Step], source: str) -> "Trajectory":
        """That of a data set's question."""
        return Trajectory(question.id, question.text, question.answers, tuple(steps), source)

    def to_json(self) -> dict:
        return vars(self) | {"answers": list(self.answers), "steps": [s.to_json() for s in self.steps]}


Example = Trajectory | Conversation
Rows = dict[str, list[Example]]  # by the names of their sources


@dataclass(kw_only=True)
class Row(TokenRecord):
    """The tokens of a row, of which the actions have loss."""

    shortened: bool = False  # its documents were cut below `max_document_tokens` to make it fit
    source: str = ""  # the name of the source that it is from, if there are several

    @property
    def loss_tokens(self) -> int:
        """How many tokens have loss. The first token of a row has none before it that could predict it."""
        return sum(self.action_mask[1:])


def read_rows(
    data: str | Path, protocol: Protocol, limit: int | None = None, skip_bad_rows: bool = False
) -> list[Example]:
    """The first `limit` rows of a file or hub string: trajectories (`steps`) or conversations of any known layout.

    A bad row raises R3LiteError with file, line and reason; with `skip_bad_rows` bad rows are left out and counted.
    """
    needed = "trajectory", "Write trajectories with `python -m r3lite.collect`."
    return converted_rows(data, lambda row, id: row_from_json(row, protocol, id), limit, skip_bad_rows, *needed)


def read_traces(data: str | Path, protocol: Protocol, skip_bad_rows: bool = False) -> list[Trajectory]:
    """A teacher's traces: trajectories (`steps`), or conversations of a question and a reply with a thought.

    Bad rows are treated as by `read_rows`.
    """
    return converted_rows(data, lambda row, id: trace_from_json(row, protocol, id), None, skip_bad_rows)


def trace_from_json(row: Record, protocol: Protocol, default_id: str = "") -> Trajectory:
    """The trace of a row; raises InvalidRecord."""
    id = row.identifier("id", default_id)
    if "steps" in row:
        return _trajectory(row, id, protocol)
    traces = {keys[1]: keys for keys, layout in LAYOUTS.items() if layout.asks}  # by the keys of their thoughts
    if not (keys := next((traces[key] for key in traces if key in row), None)):
        raise row.error(f"has neither 'steps' (a trajectory) nor {', '.join(map(repr, traces))} (a thought)")
    *system, asked, reply = (message["content"] for message in read_conversation(row, id, keys).messages)
    if system:
        raise row.error("has a system message, but traces use the prompt of --format")
    step = _stripped(replace(ThinkingChat().parse(reply, ()), faults=()))
    if problem := check_steps((step,), protocol):
        raise row.error(problem)
    return Trajectory(id, asked.strip(), (), (step,), row.text("source", "", blank=True))


def row_from_json(row: Record, protocol: Protocol, default_id: str = "") -> Example:
    """The trajectory or conversation of a row; raises InvalidRecord."""
    id = row.identifier("id", default_id)
    if keys := layout_of(row, ["steps"]):
        return read_conversation(row, id, keys)
    if "steps" in row:
        return _trajectory(row, id, protocol)
    hint = "; to make trajectories of questions, run `python -m r3lite.collect`" if "question" in row else ""
    raise row.error(f"has neither 'steps' (a trajectory) nor the keys of a conversation ({KNOWN_LAYOUTS}){hint}")


def _trajectory(row: Record, id: str, protocol: Protocol) -> Trajectory:
    steps = tuple(_stripped(Step.from_json(s)) for s in row.records("steps"))
    if problem := check_steps(steps, protocol):
        raise row.error(problem)
    # One text is one answer.
    answers = (row.text("answers"),) if isinstance(row.values.get("answers"), str) else row.texts("answers", ())
    return Trajectory(id, row.text("question").strip(), answers, steps, row.text("source", "", blank=True))


def _stripped(step: Step) -> Step:
    searches = tuple(replace(search, query=search.query.strip()) for search in step.searches)
    answer = None if step.answer is None else step.answer.strip()
    return replace(step, analysis=step.analysis.strip(), searches=searches, answer=answer)


def check_steps(steps: Sequence[Step], protocol: Protocol) -> str | None:
    """Why steps cannot be trained on, or None: each must survive rendering and parsing, the last must answer."""
    if not steps:
        return "no steps"
    for number, step in enumerate(steps, 1):
        if step.searches and not protocol.searches:
            return f"step {number} has a query, but --format is a format without search"
        written = protocol.render(step, number)
        parsed = protocol.parse(written, steps[: number - 1])
        faults = step.faults or parsed.faults
        if step.searches and step.answer is not None:
            faults = ("query_and_answer",)
        if faults:
            return f"step {number} {protocol.faults.get(faults[0], faults[0])}"
        # A step of another format may gain what this one writes besides, such as a plan of its queries.
        if (parsed.queries, protocol.render(parsed, number)) != (step.queries, written):
            return f"step {number} changes when it is written in --format and parsed"
        if number < len(steps) and step.answer is not None:
            return f"step {number} answers, but is not the last"
    return None if steps[-1].answer is not None else "the last step does not answer"


def parts_of(row: Example, layout: Layout) -> list[Example]:
    """The rows to train on for one, of which each reply follows the prompt that the chat template makes for it.

    A conversation with a thought that the template removes before later turns ends there once, to train that thought,
    and goes on without it. Every reply is trained on in one of the parts.
    """
    if not isinstance(row, Conversation) or row.has_tools:
        return [row]
    with _named(row):
        unlike = layout.tokenizer.unlike_written(row.messages)
    trained = [i for i, m in enumerate(row.messages) if m["role"] == "assistant" and m.get("train", True)]
    parts = []
    for number in trained:
        if number in unlike:
            before = [{**message, "train": False} for message in row.messages[:number]]
            parts.append(replace(row, messages=(*before, row.messages[number])))
    if set(trained) - unlike:
        parts.append(row)
    return parts


@contextlib.contextmanager
def _named(row: Conversation) -> Iterator[None]:
    """Errors within the `with` block name the row."""
    try:
        yield
    except R3LiteError as error:
        raise R3LiteError(f"row {row.id}: {error.cause}", error.remedy) from error


def encode_row(row: Example, layout: Layout) -> Row | None:
    """Tokens and mask of a row, or None if it is longer than `max_length`.

    Documents are cut to `max_document_tokens`, and to half of that again and again while the row is too long, though
    not below LEAST_DOCUMENT tokens. Question, steps and answer are never cut.
    """
    lengths = layout.lengths
    if isinstance(row, Conversation):
        with _named(row):
            if row.has_tools:
                tokens, mask = tool_chat(layout.tokenizer, row.messages, row.tools)
            else:
                tokens, mask = layout.tokenizer.chat(row.messages)
        return Row(tokens=tokens, action_mask=mask) if len(tokens) <= lengths.max_length else None
    question, limit = Question(row.id, row.question, row.answers), lengths.max_document_tokens
    while True:
        transcript = layout.lay_out(question, row.steps, limit)
        if len(transcript.tokens) <= lengths.max_length:
            return Row(
                tokens=transcript.tokens,
                action_mask=transcript.action_mask,
                shortened=limit < lengths.max_document_tokens,
            )
        limit //= 2
        if limit < LEAST_DOCUMENT:
            return None


def encode_rows(rows: Sequence[Example], layout: Layout, where: str = "") -> list[Row]:
    """All rows, and parts of rows, that fit into `max_length`; prints how many were shortened and how many left out,
    after `where`."""
    whole = len(rows)
    rows = [part for row in rows for part in parts_of(row, layout)]
    if len(rows) > whole:
        reason = "the chat template removes the thoughts of earlier replies"
        print(f"{where}{whole} rows are trained on as {len(rows)}: {reason}", file=sys.stderr)
    encoded = [encode_row(row, layout) for row in tqdm(rows, f"{where}tokenizing", unit="row", disable=None)]
    max_length = layout.lengths.max_length
    kept = [row for row in encoded if row is not None]
    shortened, skipped = sum(row.shortened for row in kept), len(rows) - len(kept)
    if shortened:
        print(f"{where}{shortened} of {len(rows)} rows fit only with shorter documents", file=sys.stderr)
    if skipped:
        print(f"{where}left out {skipped} of {len(rows)} rows, longer than {max_length} tokens", file=sys.stderr)
    if not kept:
        raise R3LiteError(f"{where}no row fits in {max_length} tokens", "Raise --max-length.")
    assert all(any(row.action_mask) for row in kept)
    return kept


def lengths_of(rows: Sequence[Row], held_out: Sequence[Row]) -> dict:
    """Of all rows the tokens of the longest, and how many all begin with alike; of those to train on the means of
    their tokens, and of those that are trained on.
    """
    tokens = [row.tokens for row in [*rows, *held_out]]
    means = {"mean_tokens": sum(len(row.tokens) for row in rows) / len(rows)}
    means |= {"writes": sum(row.loss_tokens for row in rows) / len(rows)}
    return {"longest": max(map(len, tokens)), "shared": common_prefix(min(tokens), max(tokens))} | means


def fingerprint(rows: Sequence[Row]) -> str:
    """CRC-32 of tokens and masks, so that a run is not resumed on other data under the same name."""
    value = 0
    for row in rows:
        value = zlib.crc32(repr((row.tokens, row.action_mask)).encode(), value)
    return f"{value:08x}"
