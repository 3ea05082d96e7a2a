"""One sampled episode as it grows: a transcript with the log-probabilities and values of what was sampled; and what is
told of it meanwhile."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from r3lite.core.spans import Spans
from r3lite.protocols.transcript import Transcript


@dataclass
class Listener:
    """What is called while one episode is sampled, on the engine's thread; an error that it raises ends the run.

    `text` gets what the model writes, piece by piece: the pieces of a turn make up its `Layout.readable`. `step` gets
    the sequence whenever its last step is complete: with the documents of its query, or at the end of a turn that asks
    for none.
    """

    text: Callable[[str], None]
    step: Callable[["Sequence"], None]
    heard: int = 0  # characters of the current turn

    def hear(self, readable: str, ended: bool) -> None:
        """Passes on what is new in the current turn's text; `ended`: the turn is over."""
        if len(readable) > self.heard:
            self.text(readable[self.heard :])
        self.heard = 0 if ended else len(readable)


@dataclass
class Sequence(Transcript):
    """A transcript whose turns are sampled; `logprobs` and `values` have one number for each action token."""

    stream: random.Random = field(kw_only=True)  # the sequence's own: one uniform number a token
    logprobs: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)  # of the state before the token; 0 without a critic
    cached: int = 0  # tokens that the KV cache holds
    listener: Listener | None = None
    place: int = 0  # among those that are sampled together
    turn_began: int = 0  # when the current turn did, if spans are recorded

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
        """A sequence that stands where this one stood after so many steps, with the documents of the last of them.

        What was sampled until then keeps its log-probabilities and values; what follows is drawn from `stream`.
        """
        start = self.action_mask.index(True, self.step_ends[steps - 1] + 1)  # of the turn after these steps
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
