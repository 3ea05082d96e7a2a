"""One episode as it grows: a single token sequence, each token born with its mask.

What was sampled is kept as it was sampled: nothing is decoded and tokenized again.
"""

import random
from dataclasses import dataclass, field

from r3lite.episode import Episode, Question, Step


@dataclass
class Sequence:
    """Tokens of one episode, aligned with `action` (the model sampled it), `logprobs` and `values`.

    Observations have log-probability and value 0, which no one may read. `step_ends[k]` is the index of the last
    token that the model sampled for step k: where the step's reward is paid.
    """

    question: Question
    stream: random.Random
    tokens: list[int] = field(default_factory=list)
    action: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    step_ends: list[int] = field(default_factory=list)
    finish: str | None = None
    cached: int = 0  # tokens that the KV cache holds
    turn_start: int = 0  # index of the first token of the current turn
    opening: str = ""  # text that was put into the model's mouth at the start of the current turn
    turn_over: bool = False

    def observe(self, tokens: list[int]) -> None:
        """Appends tokens that are given; the model's next turn begins after them."""
        self.tokens += tokens
        self.action += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)
        self.values += [0.0] * len(tokens)
        self.turn_start, self.turn_over, self.opening = len(self.tokens), False, ""

    def act(self, token: int, logprob: float, value: float) -> None:
        """Appends a token that the model sampled."""
        self.tokens.append(token)
        self.action.append(True)
        self.logprobs.append(logprob)
        self.values.append(value)

    @property
    def turn(self) -> list[int]:
        """Tokens sampled in the current turn."""
        return self.tokens[self.turn_start :]

    @property
    def queries(self) -> list[str]:
        return [s.query for s in self.steps if s.query is not None]

    def add_step(self, step: Step) -> None:
        self.steps.append(step)
        self.step_ends.append(len(self.tokens) - 1)

    def episode(self) -> Episode:
        return Episode(self.question, list(self.steps), self.finish)
