"""The tokens of an episode, which of them a model wrote, and the log-probabilities and values of those.

SFT rows, growing transcripts, sampled sequences and rollouts all hold their tokens in this record.
"""

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class TokenRecord:
    """T tokens. N of them are actions: those that are learned.

    A sampled action was written by the policy. In other records the actions are what a model should write: the turns of
    an SFT row, or a right answer. The other tokens are of prompts, of documents, of headings that the layout writes,
    and of earlier turns that are not learned again (`Sequence.reopened`).
    """

    tokens: list[int] = field(default_factory=list)  # [T]
    action_mask: list[bool] = field(default_factory=list)  # [T]: True for actions
    # [N] log-probabilities of the actions, recorded while they were sampled. Empty: none were recorded, as in rows of
    # SFT data. RL sets them to 0 for actions that a teacher wrote.
    logprobs: list[float] = field(default_factory=list)
    # [N] values that the critic gave to the states before the actions. Empty: none were recorded. All 0: there is no
    # critic, or a teacher wrote the actions.
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
