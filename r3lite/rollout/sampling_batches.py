"""Which tokens are sampled together after a pass, with drafts or without, and what is known of each."""

from collections.abc import Iterator
from collections.abc import Sequence as Several
from typing import NamedTuple

from r3lite.rollout.sequence import Sequence
from r3lite.settings.rollout import DRAFTING_SEQUENCES, MOST_DRAFTED

# Maximum tokens of a batch of further sequences of shared rows; the logits of such a batch are copied.
SAMPLED_TOGETHER = DRAFTING_SEQUENCES + MOST_DRAFTED


class SampledToken(NamedTuple):
    """A token that was sampled."""

    id: float  # a whole number: ids come from the device in one tensor with the other two fields
    logprob: float  # NaN if the logits are not finite
    value: float = 0.0  # the critic's, if there is one


class SamplingBatch(NamedTuple):
    """Tokens that are sampled together, one for each entry."""

    sequences: list[Sequence]
    depths: list[int]  # how many drafted tokens would come before the sampled one
    indices: list[int] | None  # the token of the pass after which each entry is sampled; None: entry i after token i

    @property
    def uniforms(self) -> list[float]:
        """The uniform number of each token."""
        return [sequence.stream.ahead(depth) for sequence, depth in zip(self.sequences, self.depths, strict=True)]

    def cut(self, first: int, end: int) -> "SamplingBatch":
        """Returns the entries from `first` up to, and without, `end`."""
        assert self.indices is not None
        return SamplingBatch(self.sequences[first:end], self.depths[first:end], self.indices[first:end])


def sampling_batches(rows: Several[list[Sequence]], drafts: Several[list[int]]) -> Iterator[SamplingBatch]:
    """Yields what is to be sampled after a pass over the last token of each row and its draft, row by row.

    The first batch has the first sequence of every row and needs no copy of the logits. The other sequences of shared
    rows follow in batches of at most SAMPLED_TOGETHER tokens; the logits of these batches are copied.
    """
    first = SamplingBatch([], [], None)
    further = SamplingBatch([], [], [])
    start = 0
    for row, draft in zip(rows, drafts, strict=True):
        depths = range(1 + len(draft))
        first.sequences.extend([row[0]] * len(depths))
        first.depths.extend(depths)
        for sequence in row[1:]:
            further.sequences.extend([sequence] * len(depths))
            further.depths.extend(depths)
            further.indices.extend(start + depth for depth in depths)
        start += len(depths)
    yield first
    for i in range(0, len(further.sequences), SAMPLED_TOGETHER):
        yield further.cut(i, i + SAMPLED_TOGETHER)
