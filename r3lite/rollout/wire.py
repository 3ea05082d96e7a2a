"""The messages between a trainer and the machines that sample for it: adapters, questions and episodes.

An episode is sent as token ids, action mask and log-probabilities, so that nothing is tokenized again, and with its
steps, for the log. All of it is checked: an episode that the trainer could not have sampled by itself raises
InvalidRecord.
"""

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from r3lite.core.episode import ANSWERED, CUT_OFF, MALFORMED, Document, Question, Step
from r3lite.core.files import PART, move
from r3lite.core.records import InvalidRecord, Record
from r3lite.models import lora
from r3lite.protocols.layout import Layout
from r3lite.protocols.tokenizer import ROLES
from r3lite.rollout.sequence import Sequence
from r3lite.rollout.uniforms import Uniforms

# Bounds of a log-probability: about the lowest number of fp32, and the most that rounding adds to 0.
LOWEST = -3.4e38
HIGHEST = 1e-3


@dataclass(frozen=True)
class EpisodeLimits:
    """The limits of the episodes that a trainer could have sampled by itself."""

    vocabulary: int  # all token ids are below this number
    max_length: int  # most tokens of an episode

    @staticmethod
    def of(layout: Layout) -> "EpisodeLimits":
        return EpisodeLimits(layout.tokenizer.size, layout.lengths.max_length)


@dataclass(frozen=True)
class AdapterFiles:
    """A LoRA adapter as it is sent: PEFT's two files, with a zero byte between. Its version is its hash."""

    body: bytes

    @staticmethod
    def read(folder: Path) -> "AdapterFiles":
        """Returns the files of an adapter's folder."""
        config = (folder / lora.ADAPTER_CONFIG).read_bytes()
        weights = (folder / lora.WEIGHTS).read_bytes()
        return AdapterFiles(config + b"\0" + weights)

    @cached_property
    def version(self) -> str:
        return hashlib.sha256(self.body).hexdigest()[:32]

    def write(self, folder: Path) -> None:
        """Writes the two files. Each replaces its old version in one operation.

        They are not overwritten in place: vLLM may have mapped them into its memory.
        Raises InvalidRecord if the body is not two files.
        """
        config, zero, weights = self.body.partition(b"\0")
        if not zero:
            raise InvalidRecord("the adapter is not two files with a zero byte between", code="wire-adapter")
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in ((lora.ADAPTER_CONFIG, config), (lora.WEIGHTS, weights)):
            part = folder / f".{name}.{threading.get_ident()}{PART}"
            part.write_bytes(content)
            move(part, folder / name)


@dataclass(frozen=True)
class Ticket:
    """An episode to sample, from its question and seed. With `start`, it goes on from the first steps of another."""

    question: Question
    seed: str
    index: int  # position among the episodes that are sampled together
    start: tuple[Sequence, int] | None = None  # that other episode, and how many of its steps are kept

    def sequence(self) -> Sequence:
        """Returns the sequence as it is before sampling: empty, or with the steps that `start` keeps."""
        stream = Uniforms(self.seed)
        if self.start is None:
            return Sequence(self.question, stream=stream, index=self.index)
        sequence, steps = self.start
        return sequence.cut_after(steps, stream)


def identity_of(facts: Mapping[str, str]) -> str:
    """Returns a hash of the facts that a trainer and its workers must have in common."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def tickets_to_json(tickets: list[Ticket]) -> dict:
    """Returns the body of a request: each question once, and without its answers, which only the trainer needs."""
    questions: list[dict] = []
    index_of_question: dict[int, int] = {}  # by the id() of the question
    episodes = []
    for ticket in tickets:
        key = id(ticket.question)
        if key not in index_of_question:
            index_of_question[key] = len(questions)
            questions.append(_question_to_json(ticket.question))
        episode = {"question": index_of_question[key], "seed": ticket.seed}
        if ticket.start is not None:
            sequence, steps = ticket.start
            episode |= {"begun": sequence_to_json(sequence), "steps": steps}
        episodes.append(episode)
    return {"questions": questions, "episodes": episodes}


def tickets_from_json(record: Record, limits: EpisodeLimits) -> list[Ticket]:
    """Returns the tickets of a request; raises InvalidRecord."""
    questions = [_question_from_json(question) for question in record.records("questions")]
    tickets = []
    for index, episode in enumerate(record.records("episodes")):
        question = questions[episode.whole("question", high=len(questions) - 1)]
        start = None
        if "begun" in episode:
            sequence = sequence_from_json(episode.record("begun"), question, limits)
            steps = episode.whole("steps", low=1, high=len(sequence.steps) - 1)
            start = (sequence, steps)
        ticket = Ticket(question, seed=episode.text("seed"), index=index, start=start)
        tickets.append(ticket)
    return tickets


def _question_to_json(question: Question) -> dict:
    return {
        "id": question.id,
        "text": question.text,
        "documents": [document.to_json() for document in question.documents],
        "gold": [document.to_json() for document in question.gold],
        "gold_by": question.gold_by,
        "earlier": list(question.earlier),
        "source": question.source,
        "procedure": question.procedure,
    }


def _question_from_json(record: Record) -> Question:
    documents = _documents(record, "documents")
    gold = _documents(record, "gold")
    earlier = []
    for message in record.records("earlier"):
        role = message.choice("role", ROLES)
        content = message.text("content", blank=True)
        earlier.append({"role": role, "content": content})
    return Question(
        source=record.text("source", blank=True),
        procedure=record.text("procedure", blank=True),
        gold_by=record.choice("gold_by", ("title", "text")),
        id=record.text("id", blank=True),
        text=record.text("text", blank=True),
        answers=(),
        documents=documents,
        gold=gold,
        earlier=tuple(earlier),
    )


def _documents(record: Record, key: str) -> tuple[Document, ...]:
    return tuple(Document.from_json(document) for document in record.records(key))


def sequence_to_json(sequence: Sequence) -> dict:
    """Returns a finished sequence in the form that `sequence_from_json` reads."""
    record = {
        "tokens": sequence.tokens,
        "actions": "".join("1" if is_action else "0" for is_action in sequence.action_mask),
        "logprobs": sequence.logprobs,
        "steps": [step.to_json() for step in sequence.steps],
        "step_ends": sequence.step_ends,
        "finish": sequence.finish,
    }
    if sequence.failure:
        record["failure"] = sequence.failure
    return record


def sequence_from_json(
    record: Record,
    question: Question,
    limits: EpisodeLimits,
    index: int = 0,
) -> Sequence:
    """Returns a finished sequence. The critic's values in it are 0, since a server runs no critic.

    Raises InvalidRecord unless its parts fit the limits and one another. Each step must end at a sampled token, and the
    last step at the last token, since these tokens get the rewards. Only the last step may have an answer, and it must
    have one if and only if `finish` is ANSWERED.
    """
    tokens = whole_numbers(record, "tokens", limits.vocabulary)
    if len(tokens) > limits.max_length:
        raise record.error(f"{record.path}tokens are {len(tokens):,}, more than --max-length {limits.max_length:,}")
    step_ends = whole_numbers(record, "step_ends", len(tokens))
    actions = record.text("actions")
    if not set(actions) <= {"0", "1"}:
        raise record.wrong("actions", "a text of 0 and 1")
    action_mask = [action == "1" for action in actions]
    logprobs = log_probabilities(record, "logprobs")
    steps = [Step.from_json(step) for step in record.records("steps")]
    lengths = (len(action_mask), sum(action_mask), len(step_ends))
    if lengths != (len(tokens), len(logprobs), len(steps)):
        raise record.error("tokens, actions, logprobs and steps are inconsistent")
    ascending = step_ends == sorted(set(step_ends))
    complete = step_ends[-1:] == [len(tokens) - 1]
    if not ascending or not complete or not all(action_mask[end] for end in step_ends):
        raise record.error(f"{record.path}step_ends are not the ends of turns that were sampled")
    finish = record.choice("finish", (ANSWERED, CUT_OFF, MALFORMED))
    has_answer = [step.answer is not None for step in steps]
    if any(has_answer[:-1]) or has_answer[-1] != (finish == ANSWERED):
        raise record.error(f"{record.path}finish is {finish}, which does not fit the answers of the steps")
    return Sequence(
        question,
        tokens=tokens,
        action_mask=action_mask,
        steps=steps,
        step_ends=step_ends,
        finish=finish,
        failure=record.text("failure", None),
        stream=Uniforms(0),
        logprobs=logprobs,
        values=[0.0] * len(logprobs),
        index=index,
    )


def check_start(sequence: Sequence, start: Sequence) -> None:
    """Raises InvalidRecord unless a sequence begins with the tokens, action mask and log-probabilities of `start`."""
    prefix = sequence.first(len(start.tokens))
    same_tokens = prefix.tokens == start.tokens and prefix.action_mask == start.action_mask
    if not same_tokens or prefix.logprobs != start.logprobs:
        raise InvalidRecord(
            f"an episode does not begin as question {sequence.question.id} does", code="wire-prompt-differs"
        )


def whole_numbers(record: Record, key: str, limit: int) -> list[int]:
    """Returns a list of whole numbers from 0 to `limit` - 1; raises InvalidRecord."""
    numbers = record.items(key)
    if not all(type(number) is int and 0 <= number < limit for number in numbers):
        raise record.wrong(key, f"a list of whole numbers from 0 to {limit - 1:,}")
    return numbers


def log_probabilities(record: Record, key: str) -> list[float]:
    """Returns a list of log-probabilities; raises InvalidRecord. Because of rounding, some may be a little above 0."""
    numbers = record.items(key)
    if not all(type(number) in (int, float) and LOWEST <= number <= HIGHEST for number in numbers):
        raise record.wrong(key, "a list of log-probabilities")
    return [float(number) for number in numbers]
