"""An episode as one growing token sequence with its action mask, and its steps so far.

SFT rows, rollouts and baselines are all transcripts. A `Layout` appends the prompt and the documents; the turns are
written by a model or taken from a trajectory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from r3lite.core.episode import Episode, Question, Search, Step
from r3lite.core.token_record import TokenRecord


@dataclass
class Transcript(TokenRecord):
    """The tokens of one episode and its steps so far.

    In a turn with a *forced answer* the layout writes the heading of the answer, and the model writes only the answer.
    The layout forces an answer if the model searches again although --max-hops steps have searched, if a limit cut the
    turn off, if no document fits, and in some baselines.
    """

    question: Question
    steps: list[Step] = field(default_factory=list)
    step_ends: list[int] = field(default_factory=list)  # index of each step's last token, which gets the step's reward
    finish: str | None = None  # None: the episode goes on
    turn_start: int = 0  # index of the first token of the current turn
    # The step whose forced answer the model writes in the current turn. None: no answer is forced in this turn.
    forced_step: Step | None = None
    # The `forced_step` that the last turn had, set when that turn is closed. `Sequence.reopened` forces it again.
    closed_forced_step: Step | None = None
    pending: tuple[Search, ...] = ()  # searches of the last step that wait for their documents
    is_last_turn: bool = False  # the current turn ends the episode: no documents and no forced answer follow it
    failure: str | None = None  # why the retriever failed at a query of the episode; None: it did not fail

    def observe(self, tokens: Sequence[int]) -> None:
        """Appends tokens that the model did not write. A new turn starts after them.

        No answer is forced in the new turn, unless `Layout` sets `forced_step` after this call.
        """
        self.tokens += tokens
        self.action_mask += [False] * len(tokens)
        self.turn_start = len(self.tokens)
        self.forced_step = None

    def write(self, tokens: Sequence[int]) -> None:
        """Appends tokens that the model wrote."""
        self.tokens += tokens
        self.action_mask += [True] * len(tokens)

    def add_step(self, step: Step) -> None:
        """Adds a step that ends at the last token."""
        self.steps.append(step)
        self.step_ends.append(len(self.tokens) - 1)

    @property
    def turn(self) -> list[int]:
        """The tokens of the current turn."""
        return self.tokens[self.turn_start :]

    def episode(self) -> Episode:
        """Returns the episode so far, without its tokens. Its `finish` is None while it goes on."""
        return Episode(
            question=self.question,
            steps=list(self.steps),
            finish=self.finish,
            tokens_written=sum(self.action_mask),
            failure=self.failure,
        )
