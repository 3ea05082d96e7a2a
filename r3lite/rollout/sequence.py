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
        )
