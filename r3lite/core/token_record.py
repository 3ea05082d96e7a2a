"""The tokens of an episode: which of them a model wrote, and the numbers that belong to the written ones.

SFT rows, growing transcripts, sampled sequences and rollouts all hold their tokens in this record.
"""

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class TokenRecord:
    """T tokens, N of which are actions: a model wrote them. The others are of prompts, documents and headings."""

    tokens: list[int] = field(default_factory=list)  # [T]
    action_mask: list[bool] = field(default_factory=list)  # [T]: True if the model wrote the token
    # [N] log-probabilities of the actions when they were sampled. Empty: the actions were not sampled. All 0: a teacher
    # wrote them.
    logprobs: list[float] = field(default_factory=list)
    # [N] values of the states before the actions. Empty: the actions were not sampled. All 0: there is no critic, or a
    # teacher wrote the tokens.
    values: list[float] = field(default_factory=list)

    def first(self, length: int) -> "TokenRecord":
        """Returns a record of the first `length` tokens."""
        action_count = sum(self.action_mask[:length])
        return TokenRecord(
            tokens=self.tokens[:length],
            action_mask=self.action_mask[:length],
            logprobs=self.logprobs[:action_count],
            values=self.values[:action_count],
        )
