"""Settings of an episode: its limits and how tokens are sampled."""

from dataclasses import dataclass
from typing import Annotated

from r3lite.core.config import Alias, Bounds, Section, Tokens, Whole


@dataclass(frozen=True)
class LengthSettings(Section):
    """Limits of an episode."""

    max_hops: Annotated[int, Bounds(low=1, high=100), Alias("num_hops")] = 5
    """most retrievals in an episode; then an answer is forced"""
    max_new_tokens: Tokens = 256
    """most tokens of one turn of the model"""
    max_length: Tokens = 4096
    """most tokens of a whole episode"""
    max_document_tokens: Tokens = 160
    """most tokens of one document; longer ones are cut"""
    end_at_idle_query: bool = False
    """an episode ends as malformed at a repeated query, as it does at a blank one"""

    @property
    def most_sampled(self) -> int:
        """The most tokens that the model can write in an episode."""
        return min((self.max_hops + 1) * self.max_new_tokens, self.max_length)


@dataclass(frozen=True)
class SamplingSettings(Section):
    """Sampling."""

    temperature: Annotated[float, Bounds(low=0, high=100)] = 1.0
    """of the softmax; 0: greedy (not in RL)"""
    rollout_batch_size: Annotated[int, Bounds(low=1, high=1 << 16)] | None = None
    """episodes decoded together; by default as many as the memory budget allows"""


@dataclass(frozen=True)
class TruncationSettings(Section):
    """Truncated sampling."""

    top_k_sampling: Whole = 0
    """sample from the k likeliest tokens only; 0: all"""
    top_p: Annotated[float, Bounds(above=0, high=1)] = 1.0
    """sample from the smallest set of tokens with this probability"""
