"""One episode while it is sampled: its transcript, its random stream and its place in the cache."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from r3lite.core.spans import Spans
from r3lite.protocols.transcript import Transcript


@dataclass
class Listener:
    """Callbacks for one episode, which the engine's thread calls; an error that they raise ends the run.

    `text` gets the text of a turn piece by piece; the pieces add up to `TurnText.readable`. `step` gets the sequence
    whenever a step is complete: with the documents of its queries, or at the end of a turn without queries.
    """

    text: Callable[[str], None]
    step: Callable[["Sequence"], None]
    characters_sent: int = 0  # of the current turn

    def hear(self, readable: str, turn_is_over: bool) -> None:
        """Passes on what is new in the current turn's text."""
        if len(readable) > self.characters_sent:
            self.text(readable[self.characters_sent :])
        self.characters_sent = 0 if turn_is_over else len(readable)


@dataclass
class Sequence(Transcript):
    """A transcript whose actions are sampled.

    `logprobs` are of the temperature-scaled, untruncated distribution; `values` are 0 without a critic.
    """

    stream: random.Random = field(kw_only=True)  # of this sequence alone: one uniform number per sampled token
    may_search: bool = True  # False: a query ends the sequence (SEARCHING), and no documents are fetched
    listener: Listener | None = None
    place: int = 0  # index among the sequences that are sampled together
    turn_started_at: int = 0  # nanoseconds since 1970; 0 if no spans are recorded

    @property
    def tokens_left(self) -> float:
        """How many tokens it may write yet: no limit of its own beside those of its layout. Serving overrides it."""
        return math.inf

    def note_turn_start(self, spans: Spans) -> None:
        """Notes the time, if nothing of the current turn has been sampled."""
        if len(self.tokens) == self.turn_start:
            self.turn_started_at = spans.now()

    def record_turn(self, spans: Spans) -> None:
        """Records the generation of the current turn, whose last token was just sampled."""
        spans.add(
            "generation",
            f"episode {self.place + 1}",
            self.turn_started_at,
            question=self.question.id,
            turn=len(self.steps) + 1,
            prompt_tokens=self.turn_start,
            new_tokens=len(self.tokens) - self.turn_start,
        )

    def restarted(self, steps: int, stream: random.Random) -> "Sequence":
        """Returns a copy of the sequence up to the turn after its first `steps` steps, to be continued with `stream`.

        It keeps the documents of these steps, and the log-probabilities and values of their action tokens.
        """
        last_end = self.step_ends[steps - 1]
        turn_start = self.action_mask.index(True, last_end + 1)
        prefix = self.first(turn_start)
        return Sequence(
            self.question,
            **vars(prefix),  # the four fields of TokenRecord
            steps=self.steps[:steps],
            step_ends=self.step_ends[:steps],
            turn_start=turn_start,
            stream=stream,
            place=self.place,
        )

    def reopened(self, stream: random.Random) -> "Sequence":
        """Returns a copy of the finished sequence up to the start of its last turn, to be ended again with `stream`.

        Nothing of the copy counts as sampled: the last turn has the only action tokens. It may not search, because new
        documents would make another context. A forced answer is forced again.
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
