"""One sampled episode as it grows: a transcript with the log-probability and value of each token."""

import random
from dataclasses import dataclass, field

from r3lite.protocols.transcript import Transcript


@dataclass
class Sequence(Transcript):
    """A transcript whose turns are sampled; `logprobs` and `values` are aligned with its tokens.

    Given tokens have log-probability and value 0, which are never used: the action mask leaves them out.
    """

    stream: random.Random = field(kw_only=True)  # the sequence's own: one uniform number a token
    logprobs: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    cached: int = 0  # tokens that the KV cache holds

    def observe(self, tokens: list[int]) -> None:
        super().observe(tokens)
        self.logprobs += [0.0] * len(tokens)
        self.values += [0.0] * len(tokens)

    def act(self, token: int, logprob: float, value: float) -> None:
        """Appends a sampled token."""
        self.write([token])
        self.logprobs.append(logprob)
        self.values.append(value)
