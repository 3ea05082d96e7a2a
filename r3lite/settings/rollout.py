"""Settings of an episode: its limits and how tokens are sampled."""

from typing import Annotated, ClassVar

from r3lite.core.config import ANY, Alias, Bounds, Free, Positive, Section, Tokens, Whole
from r3lite.settings.common import check_address


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


class SamplingSettings(Section):
    """Sampling."""

    temperature: Annotated[float, Bounds(low=0, high=100)] = 1.0
    """of the softmax; 0: greedy (not in RL)"""
    rollout_batch_size: Annotated[int, Bounds(low=1, high=1 << 16)] | None = None
    """episodes decoded together; by default as many as the memory budget allows"""


class TruncationSettings(Section):
    """Truncated sampling."""

    top_k_sampling: Whole = 0
    """sample from the k likeliest tokens only; 0: all"""
    top_p: Annotated[float, Bounds(above=0, high=1)] = 1.0
    """sample from the smallest set of tokens with this probability"""


class RemoteSettings(Section):
    """Rollouts on other machines."""

    implied: ClassVar = {"rollout_server": {ANY: {"old_logprobs": "trainer", "importance_cap": 2.0}}}

    rollout_server: Free[tuple[str, ...] | None] = None
    """addresses, with commas between, of `python -m r3lite.rollout_worker` or of vLLM, which sample the episodes: they
    get the adapter of each round, and R3LITE_TOKEN if it is set; brings --old-logprobs trainer --importance-cap 2"""
    max_staleness: Annotated[int, Bounds(low=0, high=1)] = 0
    """0: a round is sampled with the adapter that the round before it has made; 1: while that is being made, with the
    one before, and --importance-cap corrects for it"""
    rollout_timeout: Free[Positive] = 600.0
    """seconds that one request of episodes, or with vLLM of a turn, may take; then it goes to another server"""

    def check(self) -> None:
        for address in self.rollout_server or ():
            check_address("--rollout-server", address, "http://host:8100 or http://a:8100,http://b:8100")
