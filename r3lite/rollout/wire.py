"""What crosses the network between a trainer and those that sample for it: adapters, questions and episodes.

An episode crosses as token ids, action mask and log-probabilities, with its steps for the log: nothing is tokenized
again. Everything is read with distrust.
"""

import hashlib
import json
import math
import random
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from r3lite.core.episode import ANSWERED, CUT_OFF, MALFORMED, Document, Question, Step
from r3lite.core.files import PART, move
from r3lite.core.records import Record
from r3lite.models import lora
from r3lite.rollout.sequence import Sequence


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
        """Writes the two files, each whole: a server that another thread sent here may have the same file mapped."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in zip((lora.CONFIG, lora.WEIGHTS), self.body.split(b"\0", 1), strict=True):
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


def tickets_from_json(record: Record) -> list[Ticket]:
    questions, tickets = [_question(q) for q in record.records("questions")], []
    for place, asked in enumerate(record.records("episodes")):
        question = questions[asked.whole("question", high=len(questions) - 1)]
        begun = None
        if "begun" in asked:
            sequence = sequence_from_json(asked.record("begun"), question)
            begun = sequence, asked.whole("steps", low=1, high=len(sequence.steps))
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


def sequence_from_json(record: Record, question: Question, place: int = 0) -> Sequence:
    """A finished sequence; raises InvalidRecord unless its parts fit one another. No critic has seen it."""
    tokens, ends = _whole(record, "tokens"), _whole(record, "step_ends")
    mask = [written == "1" for written in record.text("actions")]
    logprobs = record.items("logprobs")
    if not all(type(x) in (int, float) and math.isfinite(x) and x <= 1e-3 for x in logprobs):
        raise record.wrong("logprobs", "a list of log-probabilities")
    steps = [Step.from_json(step) for step in record.records("steps")]
    counts = (len(mask), sum(mask), len(ends)) == (len(tokens), len(logprobs), len(steps))
    if not counts or ends != sorted(ends) or not all(end < len(tokens) for end in ends):
        raise record.error("tokens, actions, logprobs and steps are inconsistent")
    return Sequence(
        question, tokens, mask, steps, ends, record.choice("finish", (ANSWERED, CUT_OFF, MALFORMED)),
        failure=record.text("failure", None), stream=random.Random(0), logprobs=[float(x) for x in logprobs],
        values=[0.0] * len(logprobs), place=place,
    )  # fmt: skip


def _whole(record: Record, key: str) -> list[int]:
    numbers = record.items(key)
    if not all(type(x) is int and 0 <= x < 1 << 31 for x in numbers):
        raise record.wrong(key, "a list of whole numbers")
    return numbers
