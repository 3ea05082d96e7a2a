"""One sampled episode as it grows: a transcript with the log-probabilities and values of what was sampled."""

import random
from dataclasses import dataclass, field

from r3lite.protocols.transcript import Transcript


@dataclass
class Sequence(Transcript):
    """A transcript whose turns are sampled; `logprobs` and `values` have one number for each action token."""

    stream: random.Random = field(kw_only=True)  # the sequence's own: one uniform number a token
    logprobs: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)  # of the state before the token; 0 without a critic
    cached: int = 0  # tokens that the KV cache holds
