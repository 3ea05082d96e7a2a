"""One episode while it is sampled: its transcript, its random stream and its listener."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from r3lite.core.spans import Spans
from r3lite.protocols.transcript import Transcript
from r3lite.rollout.uniforms import Uniforms


@dataclass
class Listener:
    """Callbacks for one episode. The engine's thread calls them, and an error that they raise ends the run.

    `text` gets the text of a turn piece by piece; the pieces add up to `TurnText.readable`. `step` gets the sequence
    whenever a step is complete: when the documents of its queries have been added, or at the end of a turn without
    queries. A step whose documents do not fit is completed by a forced answer.
    """

    text: Callable[[str], None]
    step: Callable[["Sequence"], None]
    characters_sent: int = 0  # how many characters of the current turn `text` has got

    def hear(self, readable: str, turn_is_over: bool) -> None:
        """Passes on what is new in the current turn's text."""
        if len(readable) > self.characters_sent:
            self.text(readable[self.characters_sent :])
        self.characters_sent = 0 if turn_is_over else len(readable)


@dataclass
class Sequence(Transcript):
    """A transcript whose actions are sampled.

    `logprobs` are of the softmax of logits / temperature (1 if greedy), without truncation. `values` are 0 without a
    critic.
    """

    stream: Uniforms = field(kw_only=True)  # draws one number per sampled token; each sequence has its own
    listener: Listener | None = None
    index: int = 0  # among the sequences that are sampled together
    turn_begin_time: int = 0  # of the current turn, in nanoseconds since 1970; 0 if no spans are recorded

    @property
    def tokens_left(self) -> float:
        """How many more tokens the sequence may write, besides the limits of its layout. `lanes.py` overrides it."""
        return math.inf

    def note_turn_start(self, spans: Spans) -> None:
        """Notes the time as the beginning of the current turn, if none of its tokens has been sampled."""
        if len(self.tokens) == self.turn_start:
            self.turn_begin_time = spans.now()

    def record_turn(self, spans: Spans) -> None:
        """Records the generation of the current turn, whose last token was just sampled."""
        spans.add(
            "generation",
            f"episode {self.index + 1}",
            self.turn_begin_time,
            question=self.question.id,
            turn=len(self.steps) + 1,
            prompt_tokens=self.turn_start,
            new_tokens=len(self.tokens) - self.turn_start,
        )

    def cut_after(self, steps: int, stream: Uniforms) -> "Sequence":
        """Returns a copy cut off behind the first `steps` steps and their documents, where the next turn begins.

        The copy has the log-probabilities and values of the action tokens of these steps. `stream` draws the tokens
        that follow.
        """
        # Between a step's last token and the next turn are the documents, which are no actions. There is a next turn:
        # a step's documents are cut so that they leave room for it (`Observations.fit`).
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
            index=self.index,
        )

    def reopened(self, stream: Uniforms) -> "Sequence":
        """Returns a copy of the finished sequence that ends where its last turn begins, to sample another last turn.

        `stream` draws the tokens of the new turn. Only they will be action tokens: the copy has none. No
        documents follow it, because all these last turns must have read the same documents: a query ends the episode
        (SEARCHING), even where the hops are used up. A forced answer is forced again.
        """
        return Sequence(
            self.question,
            tokens=self.tokens[: self.turn_start],
            action_mask=[False] * self.turn_start,
            steps=self.steps[:-1],
            step_ends=self.step_ends[:-1],
            turn_start=self.turn_start,
            forced_step=self.closed_forced_step,
            stream=stream,
            is_last_turn=True,
            index=self.index,
        )
