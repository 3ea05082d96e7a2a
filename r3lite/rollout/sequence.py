"""One episode while it is sampled: its transcript, with log-probabilities and values of the action tokens."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from r3lite.core.spans import Spans
from r3lite.protocols.transcript import Transcript


@dataclass
class Listener:
    """Callbacks for one episode, which the engine's thread calls; an error that they raise ends the run.

    `text` gets the text of a turn piece by piece; the pieces add up to `Layout.readable`. `step` gets the sequence
    whenever a step is complete: with the documents of its queries, or at the end of a turn without queries.
    """

    text: Callable[[str], None]
    step: Callable[["Sequence"], None]
    passed_on: int = 0  # characters of the current turn

    def hear(self, readable: str, ended: bool) -> None:
        """Passes on what is new in the current turn's text; `ended`: the turn is over."""
        if len(readable) > self.passed_on:
            self.text(readable[self.passed_on :])
        self.passed_on = 0 if ended else len(readable)


@dataclass
class Sequence(Transcript):
    """A transcript whose N action tokens are sampled."""

    stream: random.Random = field(kw_only=True)  # of this sequence alone: one uniform number per sampled token
    logprobs: list[float] = field(default_factory=list)  # [N] of the temperature-scaled, untruncated distribution
    values: list[float] = field(default_factory=list)  # [N] of the states before the action tokens; 0 without a critic
    may_search: bool = True  # False: a query ends the sequence (SEARCHING), and no documents are fetched
    cached: int = 0  # tokens whose keys and values are in the KV cache
    listener: Listener | None = None
    place: int = 0  # index among the sequences that are sampled together
    turn_began: int = 0  # nanoseconds since 1970, if spans are recorded

    def begin_turn(self, spans: Spans) -> None:
        """Notes the time, if nothing of the current turn has been sampled."""
        if len(self.tokens) == self.turn_start:
            self.turn_began = spans.now()

    def record_turn(self, spans: Spans) -> None:
        """Records the generation of the current turn, whose last token was just sampled."""
        spans.add(
            "generation", f"episode {self.place + 1}", self.turn_began, question=self.question.id,
            turn=len(self.steps) + 1, prompt_tokens=self.turn_start, new_tokens=len(self.tokens) - self.turn_start,
        )  # fmt: skip

    def restarted(self, steps: int, stream: random.Random) -> "Sequence":
        """A copy of the sequence up to the turn after its first `steps` steps, to be continued with `stream`.

        It keeps the documents of these steps, and the log-probabilities and values of their action tokens.
        """
        start = self.action_mask.index(True, self.step_ends[steps - 1] + 1)  # first token of the next turn
        sampled = sum(self.action_mask[:start])
        return Sequence(
            self.question,
            tokens=self.tokens[:start],
            action_mask=self.action_mask[:start],
            steps=self.steps[:steps],
            step_ends=self.step_ends[:steps],
            turn_start=start,
            stream=stream,
            logprobs=self.logprobs[:sampled],
            values=self.values[:sampled],
            place=self.place,
        )

    def reopened(self, stream: random.Random) -> "Sequence":
        """A copy of the finished sequence up to the start of its last turn, to be ended again with `stream`.

        All of it is given: the last turn has the only action tokens. It may not search, because new documents would
        make another context. A forced answer is forced again.
        """
        return Sequence(
            self.question,
            tokens=self.tokens[: self.turn_start],
            action_mask=[False] * self.turn_start,
            steps=self.steps[:-1],
            step_ends=self.step_ends[:-1],
            turn_start=self.turn_start,
            awaiting_answer=self.forced_step,
            stream=stream,
            may_search=False,
            place=self.place,
        )
