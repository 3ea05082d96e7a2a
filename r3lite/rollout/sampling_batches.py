"""Which tokens are sampled together after a pass, with drafts or without, and the result for each."""

from collections.abc import Iterator
from collections.abc import Sequence as Several
from typing import NamedTuple

from r3lite.rollout.sequence import Sequence
from r3lite.settings.rollout import DRAFTING_SEQUENCES, MOST_DRAFTED

# Maximum tokens of a batch for the further sequences of shared rows (see `sampling_batches`), whose logits are copied.
SAMPLED_TOGETHER = DRAFTING_SEQUENCES + MOST_DRAFTED


class SampledToken(NamedTuple):
    """A token that was sampled."""

    id: float  # the token id, a whole number; a float because one tensor brings all three fields from the device
    logprob: float  # NaN if the logits are not finite
    value: float = 0.0  # the critic's value of the state before the token; 0 without a critic


class SamplingBatch(NamedTuple):
    """Tokens that are sampled together. Each of the three lists has one entry per token."""

    sequences: list[Sequence]  # the sequence for which the token is sampled
    depths: list[int]  # how many drafted tokens stand between the sequence's last token and the sampled one
    # Index, among the tokens that the pass has run, of the one after which the token is sampled. None: entry i is
    # sampled after token i.
    indices: list[int] | None

    @property
    def uniforms(self) -> list[float]:
        """The uniform number with which each token is sampled."""
        return [sequence.stream.peek(depth) for sequence, depth in zip(self.sequences, self.depths, strict=True)]

    def cut(self, first: int, end: int) -> "SamplingBatch":
        """Returns the entries with the indices `first` to `end` - 1."""
        assert self.indices is not None
        return SamplingBatch(self.sequences[first:end], self.depths[first:end], self.indices[first:end])


def sampling_batches(rows: Several[list[Sequence]], drafts: Several[list[int]]) -> Iterator[SamplingBatch]:
    """Yields what is sampled after a pass over the last token of each row and its draft, row by row.

    For each sequence, a token is sampled after its last token and after each token of its row's draft. The first batch
    has the first sequence of every row and needs no copy of the logits. The other sequences of shared rows follow in
    batches of at most SAMPLED_TOGETHER tokens; the logits of these batches are copied.
    """
    first = SamplingBatch([], [], None)
    further = SamplingBatch([], [], [])
    row_start = 0  # index of the row's last token among the tokens of the pass
    for row, draft in zip(rows, drafts, strict=True):
        depths = range(1 + len(draft))
        first.sequences.extend([row[0]] * len(depths))
        first.depths.extend(depths)
        for sequence in row[1:]:
            further.sequences.extend([sequence] * len(depths))
            further.depths.extend(depths)
            further.indices.extend(row_start + depth for depth in depths)
        row_start += len(depths)
    yield first
    for i in range(0, len(further.sequences), SAMPLED_TOGETHER):
        yield further.cut(i, i + SAMPLED_TOGETHER)
