"""Settings of an episode: its limits and how tokens are sampled."""

from typing import Annotated, ClassVar

from r3lite.core.config import ANY, Alias, Basic, Bounds, Free, OfRun, Positive, Section, Tokens, Whole
from r3lite.core.needs import Needs, NeedsOthers
from r3lite.settings.addresses import check_address
from r3lite.settings.conditions import has_documents, has_queries

# Lower temperatures are greedy: logits divided by them may exceed float32. The likeliest token would have a probability
# of about 1 anyway, unless two logits are almost equal.
LEAST_TEMPERATURE = 1e-5
# With more sequences, no drafts are used: a pass over so many has enough to compute without drafts. Sequences are
# counted here, not the rows that they may share. The memory plan counts the logits of drafts for this many sequences.
DRAFTING_SEQUENCES = 16
# The most tokens, of all rows together, that a CUDA graph with drafts runs in one pass. With so few tokens, reading the
# weights, which a card does once per pass, takes longer than the computation.
GRAPH_PLACES = 32
MOST_DRAFTED = 32  # the most drafted tokens of all rows in one pass; limits the memory of their logits
TRUNCATED_ROWS = 8  # the most rows of probabilities that top-k and top-p sort at once; limits their memory


def is_greedy(temperature: float) -> bool:
    """Tells whether the likeliest token is taken, and none is drawn at random."""
    return temperature < LEAST_TEMPERATURE


class LengthSettings(Section):
    """Limits of an episode."""

    needs: ClassVar = (
        NeedsOthers(
            "max_hops end_at_idle_query",
            "a --format and a --baseline in which the model writes queries",
            has_queries,
        ),
        NeedsOthers("max_document_tokens", "retrieved documents", has_documents),
    )

    max_hops: Basic[Annotated[int, Bounds(low=1, high=100), Alias("num_hops")]] = 5
    """maximum retrievals in an episode. Then the model must answer"""
    max_new_tokens: Basic[Tokens] = 256
    """maximum tokens in one turn of the model"""
    max_length: Basic[OfRun[Tokens]] = 4096
    """maximum tokens in a whole episode"""
    max_document_tokens: Tokens = 160
    """maximum tokens in a document; longer documents are cut"""
    end_at_idle_query: bool = False
    """end an episode as malformed at a repeated query, as at a blank one"""

    @property
    def most_turns(self) -> int:
        """Returns the most turns that the model can write in an episode.

        There is one turn before each retrieval. One more turn may search again or reach its token limit. Then an answer
        is forced (`Layout.close_turn`), which is the last turn.
        """
        return self.max_hops + 2

    @property
    def most_sampled(self) -> int:
        """Returns the most tokens that the model can write in an episode."""
        return min(self.most_turns * self.max_new_tokens, self.max_length)


class SamplingSettings(Section):
    """Sampling."""

    temperature: Basic[Annotated[float, Bounds(low=0, high=100)]] = 1.0
    """softmax temperature. 0, or less than 0.00001: greedy (not in RL)"""
    rollout_batch_size: Annotated[int, Bounds(low=1, high=1 << 16)] | None = None
    """episodes sampled together; default: as many as fit in the memory budget"""
    draft_tokens: Annotated[int, Bounds(low=0, high=MOST_DRAFTED)] = 7
    """maximum tokens of a draft, copied from the context and verified in one pass (not on MPS);
    0: none"""


class TruncationSettings(Section):
    """Truncated sampling."""

    needs: ClassVar = (
        NeedsOthers(
            "top_k_sampling top_p",
            "a --temperature above 0",
            lambda s: s.command == "serve" or not is_greedy(s.temperature or 0),
        ),
    )

    top_k_sampling: Whole = 0
    """sample from the k most likely tokens only; 0: from all"""
    top_p: Annotated[float, Bounds(above=0, high=1)] = 1.0
    """sample from the smallest set of tokens with this total probability"""

    @property
    def truncates(self) -> bool:
        """Whether any token may be excluded."""
        return self.top_k_sampling > 0 or self.top_p < 1


class RemoteSettings(Section):
    """Rollouts on other machines."""

    implied: ClassVar = {"rollout_server": {ANY: {"old_logprobs": "trainer", "importance_cap": 2.0}}}
    needs: ClassVar = (Needs("max_staleness rollout_timeout", "--rollout-server", lambda s: s.rollout_server),)

    rollout_server: Free[tuple[str, ...] | None] = None
    """comma-separated addresses of `python -m r3lite.rollout_worker` or vLLM servers that sample the episodes. They
    receive the adapter each round, and R3LITE_TOKEN if it is set. Sets --old-logprobs trainer --importance-cap 2"""
    max_staleness: Annotated[int, Bounds(low=0, high=1)] = 0
    """0: sample each round with the newest adapter; 1: sample the next round during an update, with the adapter from
    before it; --importance-cap corrects for the difference"""
    rollout_timeout: Free[Positive] = 600.0
    """seconds for a request of episodes (with vLLM: of a turn); after that it is sent to another server"""

    def check(self) -> None:
        for address in self.rollout_server or ():
            check_address("--rollout-server", address, "http://host:8100 or http://a:8100,http://b:8100")
