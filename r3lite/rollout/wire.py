"""What crosses the network between a trainer and those that sample for it: adapters, questions and episodes.

An episode crosses as token ids, action mask and log-probabilities, with its steps for the log: nothing is tokenized
again. Everything is read with distrust: what a server sends is either what a trainer could have sampled by itself, or
raises InvalidRecord.
"""

import hashlib
import json
import random
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from r3lite.core.episode import ANSWERED, CUT_OFF, MALFORMED, Document, Question, Step
from r3lite.core.files import PART, move
from r3lite.core.records import InvalidRecord, Record
from r3lite.models import lora
from r3lite.protocols.transcript import Layout
from r3lite.rollout.sequence import Sequence

LOWEST, HIGHEST = -3.4e38, 1e-3  # log-probabilities: fp32 holds none below, and rounding takes none further above 0


@dataclass(frozen=True)
class Bounds:
    """What no episode goes beyond."""

    vocabulary: int  # token ids are below it
    max_length: int  # tokens

    @staticmethod
    def of(layout: Layout) -> "Bounds":
        return Bounds(layout.tokenizer.size, layout.lengths.max_length)


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter as it is sent: PEFT's two files, with a zero byte between. Its version is its hash."""

    body: bytes

    @staticmethod
    def saved(folder: Path) -> "Adapter":
        """That of a folder."""
        return Adapter((folder / lora.CONFIG).read_bytes() + b"\0" + (folder / lora.WEIGHTS).read_bytes())

    @cached_property
    def version(self) -> str:
        return hashlib.sha256(self.body).hexdigest()[:32]

    def write(self, folder: Path) -> None:
        """Writes the two files, each whole: a server that another thread sent here may have the same file mapped.

        Raises InvalidRecord if they are not two.
        """
        config, zero, weights = self.body.partition(b"\0")
        if not zero:
            raise InvalidRecord("the adapter is not two files with a zero byte between")
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in ((lora.CONFIG, config), (lora.WEIGHTS, weights)):
            part = folder / f".{name}.{threading.get_ident()}{PART}"
            part.write_bytes(content)
            move(part, folder / name)


@dataclass(frozen=True)
class Ticket:
    """An episode to sample: its question and its seed; or another end of an episode, after its first steps."""

    question: Question
    seed: str
    place: int
    begun: tuple[Sequence, int] | None = None

    def sequence(self) -> Sequence:
        """The sequence at its beginning; without tokens if it is to be opened."""
        stream = random.Random(self.seed)
        if self.begun:
            return self.begun[0].restarted(self.begun[1], stream)
        return Sequence(self.question, stream=stream, place=self.place)


def identity_of(facts: Mapping[str, str]) -> str:
    """A hash of what a trainer and its workers must have in common."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def tickets_to_json(tickets: list[Ticket]) -> dict:
    """Each question once; without its answers, which only rewards need."""
    questions = list({id(ticket.question): ticket.question for ticket in tickets}.values())
    places, asked = {id(question): i for i, question in enumerate(questions)}, []
    for ticket in tickets:
        begun = {"begun": sequence_to_json(ticket.begun[0]), "steps": ticket.begun[1]} if ticket.begun else {}
        asked.append({"question": places[id(ticket.question)], "seed": ticket.seed} | begun)
    return {"questions": [_question_to_json(question) for question in questions], "episodes": asked}


def tickets_from_json(record: Record, bounds: Bounds) -> list[Ticket]:
    """The tickets of a request; raises InvalidRecord."""
    questions, tickets = [_question(q) for q in record.records("questions")], []
    for place, asked in enumerate(record.records("episodes")):
        question = questions[asked.whole("question", high=len(questions) - 1)]
        begun = None
        if "begun" in asked:
            sequence = sequence_from_json(asked.record("begun"), question, bounds)
            begun = sequence, asked.whole("steps", low=1, high=len(sequence.steps) - 1)
        tickets.append(Ticket(question, asked.text("seed"), place, begun))
    return tickets


def _question_to_json(q: Question) -> dict:
    documents, gold = ([d.to_json() for d in some] for some in (q.documents, q.gold))
    record = {"id": q.id, "text": q.text, "documents": documents, "gold": gold, "gold_by": q.gold_by}
    return record | {"earlier": list(q.earlier), "source": q.source, "procedure": q.procedure}


def _question(record: Record) -> Question:
    documents, gold = (tuple(map(Document.from_json, record.records(key))) for key in ("documents", "gold"))
    earlier = tuple({k: m.text(k, blank=True) for k in ("role", "content")} for m in record.records("earlier"))
    source, procedure = (record.text(key, blank=True) for key in ("source", "procedure"))
    gold_by = record.choice("gold_by", ("title", "text"))
    id, text = record.text("id", blank=True), record.text("text", blank=True)
    return Question(id, text, (), documents, gold, gold_by, earlier=earlier, source=source, procedure=procedure)


def sequence_to_json(s: Sequence) -> dict:
    record = {
        "tokens": s.tokens,
        "actions": "".join("01"[written] for written in s.action_mask),
        "logprobs": s.logprobs,
    }
    record |= {"steps": [step.to_json() for step in s.steps], "step_ends": s.step_ends, "finish": s.finish}
    return record | ({"failure": s.failure} if s.failure else {})


def sequence_from_json(record: Record, question: Question, bounds: Bounds, place: int = 0) -> Sequence:
    """A finished sequence; raises InvalidRecord unless its parts fit the bounds and one another. No critic has seen it.

    Each step ends at a token that was sampled, and the last one at the end: rewards belong to these tokens.
    """
    tokens = whole_numbers(record, "tokens", bounds.vocabulary)
    if len(tokens) > bounds.max_length:
        raise record.error(f"{record.path}tokens are {len(tokens):,}, more than --max-length {bounds.max_length:,}")
    ends = whole_numbers(record, "step_ends", len(tokens))
    actions = record.text("actions")
    if not set(actions) <= {"0", "1"}:
        raise record.wrong("actions", "a text of 0 and 1")
    mask = [action == "1" for action in actions]
    logprobs = log_probabilities(record, "logprobs")
    steps = [Step.from_json(step) for step in record.records("steps")]
    if (len(mask), sum(mask), len(ends)) != (len(tokens), len(logprobs), len(steps)):
        raise record.error("tokens, actions, logprobs and steps are inconsistent")
    if ends != sorted(set(ends)) or ends[-1:] != [len(tokens) - 1] or not all(mask[end] for end in ends):
        raise record.error(f"{record.path}step_ends are not the ends of turns that were sampled")
    return Sequence(
        question,
        tokens=tokens,
        action_mask=mask,
        steps=steps,
        step_ends=ends,
        finish=record.choice("finish", (ANSWERED, CUT_OFF, MALFORMED)),
        failure=record.text("failure", None),
        stream=random.Random(0),
        logprobs=logprobs,
        values=[0.0] * len(logprobs),
        place=place,
    )


def check_beginning(sequence: Sequence, begun: Sequence) -> None:
    """Raises InvalidRecord unless a sequence goes on from `begun`: the prompt of its question, or its first steps."""
    length, sampled = len(begun.tokens), len(begun.logprobs)
    theirs = sequence.tokens[:length], sequence.action_mask[:length], sequence.logprobs[:sampled]
    if theirs != (begun.tokens, begun.action_mask, begun.logprobs):
        raise InvalidRecord(f"an episode does not begin as question {sequence.question.id} does")


def whole_numbers(record: Record, key: str, limit: int) -> list[int]:
    """A list of whole numbers from 0 up to, and without, `limit`."""
    numbers = record.items(key)
    if not all(type(x) is int and 0 <= x < limit for x in numbers):
        raise record.wrong(key, f"a list of whole numbers from 0 to {limit - 1:,}")
    return numbers


def log_probabilities(record: Record, key: str) -> list[float]:
    """A list of log-probabilities, of which rounding may take one a little above 0."""
    numbers = record.items(key)
    if not all(type(x) in (int, float) and LOWEST <= x <= HIGHEST for x in numbers):
        raise record.wrong(key, "a list of log-probabilities")
    return [float(x) for x in numbers]
