"""One episode while it is sampled: its transcript, its random stream and its listener."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from r3lite.core.spans import Spans
from r3lite.protocols.transcript import Transcript
from r3lite.rollout.uniforms import Uniforms


@dataclass
class Listener:
    """Two callbacks for one episode. The engine calls them on its own thread; an error that one raises ends the run.

    `on_text` gets the text of a turn piece by piece; the pieces add up to `TurnText.readable`. `on_step` gets the
    sequence whenever a step is complete: when the documents of its queries have been appended, or at the end of its
    turn if neither documents nor a forced answer follow. A forced answer completes the step that it belongs to.
    """

    on_text: Callable[[str], None]
    on_step: Callable[["Sequence"], None]
    characters_sent: int = 0  # how many characters of the current turn `on_text` has got

    def send_text(self, readable: str, turn_is_over: bool) -> None:
        """Calls `on_text` with the new part of `readable`, which is the current turn's text so far."""
        if len(readable) > self.characters_sent:
            self.on_text(readable[self.characters_sent :])
        self.characters_sent = 0 if turn_is_over else len(readable)


@dataclass
class Sequence(Transcript):
    """A transcript whose actions are sampled.

    `logprobs` are of the softmax of logits / temperature, without top-k and top-p; greedy sampling counts as
    temperature 1. `values` are 0 without a critic.
    """

    # One uniform number of the stream is used for each sampled token. Each sequence has a stream of its own.
    stream: Uniforms = field(kw_only=True)
    listener: Listener | None = None
    # Names the episode in spans: its number in the call of `Engine.run` that began it. Copies keep the number.
    index: int = 0
    turn_begin_time: int = 0  # when the current turn began, in nanoseconds since 1970; 0 if no spans are recorded

    @property
    def tokens_left(self) -> float:
        """How many more tokens the sequence may write, besides the limits of the layout.

        Only a request to the server has such a limit (`lanes.Visitor`): in training it is infinite.
        """
        return math.inf

    def note_turn_start(self, spans: Spans) -> None:
        """Sets `turn_begin_time` to the present time, if no token of the current turn has been sampled yet."""
        if len(self.tokens) == self.turn_start:
            self.turn_begin_time = spans.now()

    def record_turn(self, spans: Spans) -> None:
        """Adds a span for the generation of the current turn, whose last token was just sampled."""
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
        """Returns a copy that ends after the first `steps` steps and their documents, where the next turn begins.

        The copy has the log-probabilities and values of these steps' action tokens. The tokens that follow are sampled
        with `stream`.
        """
        # The next turn begins at the first action token after the step's last token; the documents between them are no
        # actions. There is a next turn: documents are cut so that they leave room for one (`Observations.fit`).
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
        """Returns a copy of the finished sequence without its last turn, so that another last turn can be sampled.

        The tokens of the new turn are sampled with `stream`; they will be the only action tokens of the copy. A query
        in the new turn gets no documents, and after --max-hops steps it does not lead to a forced answer either: it
        ends the episode as SEARCHING (a repeated query as MALFORMED, with --end-at-idle-query). So all last turns of a
        sequence are written after the same documents. If the answer was forced in the old turn, it is forced in the
        new one.
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
