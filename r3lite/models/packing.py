"""Packs: rows of tokens laid end to end without padding, where a prefix that several rows share is computed once.

A pack's rows form a tree of segments. A segment is a stretch of tokens that one or more rows have in common. A token
attends to the tokens up to itself in its segment, and to all segments on the way to the root. Hidden states, and so
gradients, are the same as if each row were run alone, because no token attends to what comes after it. Knows nothing of
losses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, takewhile

import torch
import torch.nn.functional as F
from torch import Tensor

from r3lite.models.attention import StretchMasks, grouped_attention, preceded_by_zeros
from r3lite.models.causal_lm import CausalLM
from r3lite.models.functions import causal_convolution
from r3lite.models.gated_delta import ChunkPlan, DeltaHeads, DeltaInputs, delta_chunks

GRANULE = 16  # prefixes are shared in multiples of this many tokens: fewer do not pay for an attention of their own


@dataclass(frozen=True)
class Segment:
    """A segment of a pack. The segments of a pack, one after another, are its N tokens."""

    size: int  # tokens
    ancestors: tuple[int, ...]  # the numbers of the segments on the way from the root to this one, the nearest last


@dataclass(frozen=True)
class Pack:
    """The tokens of several rows, N in all; the attention context of a pass over them."""

    tokens: Tensor  # [1, N], on the host
    positions: Tensor  # [1, N]
    segments: list[Segment]
    masks: StretchMasks  # for each segment, the mask over its ancestors' and its own tokens
    places: list[list[int]]  # for each row, the places of its tokens among the N

    @staticmethod
    def of(rows: Sequence[Sequence[int]], device: torch.device) -> "Pack":
        """Packs rows of token ids."""
        order, shared_counts = _sorted(rows)
        tokens: list[int] = []
        positions: list[int] = []
        spans: list[range] = []  # for each segment, the places of its tokens among the N
        ancestors: list[tuple[int, ...]] = []  # of each segment
        places: list[list[int]] = [[]] * len(rows)

        def lay_out(
            first: int,
            last: int,
            depth: int,
            path: tuple[int, ...],
        ) -> None:
            """Lays out the subtree of the rows order[first] .. order[last - 1].

            The first `depth` tokens of these rows are laid out already, as the segments `path`.
            """
            row = rows[order[first]]
            # The tokens that all these rows share; all tokens if it is one row.
            common = min(shared_counts[first + 1 : last], default=len(row))
            if common > depth:
                spans.append(range(len(tokens), len(tokens) + common - depth))
                ancestors.append(path)
                tokens.extend(row[depth:common])
                positions.extend(range(depth, common))
                path = (*path, len(spans) - 1)
            if last == first + 1:
                places[order[first]] = [place for segment in path for place in spans[segment]]
                return
            # A branch begins at each row that shares no more than `common` tokens with the row before it.
            branches = [i for i in range(first + 1, last) if shared_counts[i] == common]
            for branch_first, branch_last in pairwise([first, *branches, last]):
                lay_out(branch_first, branch_last, depth=common, path=path)

        if rows:
            lay_out(0, len(rows), depth=0, path=())
        stretches = [(positions[span.start], len(span)) for span in spans]  # see StretchMasks
        segments = [Segment(size=len(span), ancestors=path) for span, path in zip(spans, ancestors, strict=True)]
        # The host does not wait for what the device is still doing.
        positions_on_device = torch.tensor([positions]).to(device, non_blocking=True)
        return Pack(
            tokens=torch.tensor([tokens]),
            positions=positions_on_device,
            segments=segments,
            masks=StretchMasks(stretches),
            places=places,
        )

    def attend(
        self,
        layer: int,
        q: Tensor,
        kv: Tensor,
        window: int | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """See AttentionContext: q [1, H, N, D], kv [1, 2 K, N, D] -> [1, N, H D]."""
        # Not slices: the gradient of each slice would be a tensor of all N tokens, nearly all of it zeros.
        sizes = [segment.size for segment in self.segments]
        queries = q.split(sizes, dim=2)
        keys_values = kv.split(sizes, dim=2)
        outputs = []
        masks = self.masks.of(window, q)
        for i, segment in enumerate(self.segments):
            if segment.ancestors:
                visible = torch.cat([keys_values[j] for j in (*segment.ancestors, i)], dim=2)
            else:
                visible = keys_values[i]
            outputs.append(grouped_attention(queries[i], visible, masks[i], scale=scale))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def convolve(
        self,
        layer: int,
        x: Tensor,
        weight: Tensor,
    ) -> Tensor:
        """See AttentionContext: x [1, N, C] -> [1, N, C]."""
        tokens_before = weight.shape[1] - 1  # that a convolution sees before a token
        # A convolution never sees farther back than into the nearest ancestor, which has at least GRANULE tokens.
        assert tokens_before <= GRANULE, "a segment that others follow has at least so many tokens"
        segment_values = x.split([segment.size for segment in self.segments], dim=1)
        # Read only of segments that others follow, which are long enough.
        last_values = [values[:, values.shape[1] - tokens_before :] for values in segment_values]
        outputs = []
        for segment, values in zip(self.segments, segment_values, strict=True):
            if segment.ancestors:
                parent = segment.ancestors[-1]
                visible = torch.cat((last_values[parent], values), dim=1)
            else:
                visible = preceded_by_zeros(values, weight)
            outputs.append(causal_convolution(visible, weight))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    @cached_property
    def plan(self) -> ChunkPlan:
        """How a gated delta rule runs the segments: each starts from the state at the end of its nearest ancestor."""
        sizes = [segment.size for segment in self.segments]
        parents = [segment.ancestors[-1] if segment.ancestors else None for segment in self.segments]
        return ChunkPlan(sizes, parents, self.positions.device)

    def apply_delta_rule(
        self,
        layer: int,
        inputs: DeltaInputs,
        heads: DeltaHeads,
    ) -> Tensor:
        """See AttentionContext: inputs of [1, N] tokens -> [1, N, H D_v]."""
        out, _ = delta_chunks(inputs.flat(), None, heads, self.plan)
        return out[None]

    def predicted(self, masks: Sequence[Sequence[bool]]) -> tuple[Tensor, Tensor]:
        """Returns the tokens that the rows' masks select, as targets: first their states' places, then their ids.

        The state that predicts a token is at the place of the token before it. Both tensors are [n], in the order of
        rows and tokens. A row's first token is left out, as no state predicts it. A token that several rows share comes
        once for each row whose mask selects it.
        """
        ids = self.tokens[0].tolist()
        pairs = []
        for row_places, mask in zip(self.places, masks, strict=True):
            for t in range(1, len(row_places)):
                if mask[t]:
                    pairs.append((row_places[t - 1], ids[row_places[t]]))
        columns = torch.tensor(pairs, dtype=torch.long).view(-1, 2)
        state_places, targets = columns.to(self.positions.device, non_blocking=True).unbind(1)
        return state_places, targets


def states_before(
    model: CausalLM, rows: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]]
) -> tuple[Tensor, Tensor]:
    """Runs a model over rows in one pack.

    Returns the states [n, C] that predict the tokens that the rows' masks select, and the ids [n] of these tokens. See
    Pack.predicted.
    """
    pack = Pack.of(rows, model.head_weight.device)
    places, tokens = pack.predicted(masks)
    return states_at(model(pack.tokens, pack), places), tokens


def states_at(hidden: Tensor, places: Tensor) -> Tensor:
    """Returns the states [n, C] at `places` [n] of a pack's `hidden` [1, N, C]; a place may come several times."""
    # Not hidden[0, places]: in the gradient of indexing, several CPU threads add in an order that changes from run to
    # run, so that equal runs would differ in the last digits. The gradient of an embedding has a fixed order, and is
    # faster.
    return F.embedding(places, hidden[0])


def pack_rows(
    rows: Sequence[Sequence[int]],
    max_tokens: int,
    max_rows: int,
) -> list[list[int]]:
    """Divides rows into packs of at most `max_rows` rows and `max_tokens` tokens; returns each pack's indices of rows.

    A row with more than `max_tokens` tokens is a pack of its own. The order is alphabetical, so that rows with a common
    prefix come into the same pack if they fit.
    """
    order, shared_counts = _sorted(rows)
    packs: list[list[int]] = []
    pack_tokens = 0
    for i, shared_count in zip(order, shared_counts):
        new_tokens = len(rows[i]) - shared_count
        if not packs or len(packs[-1]) == max_rows or pack_tokens + new_tokens > max_tokens:
            packs.append([])
            pack_tokens = 0
            new_tokens = len(rows[i])
        packs[-1].append(i)
        pack_tokens += new_tokens
    return packs


def _sorted(rows: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Returns the rows' indices in alphabetical order, and how many tokens each row shares with the row before it.

    Of the first row the count is 0. In this order rows with a common prefix are neighbours.
    """
    if not rows:
        return [], []
    order = sorted(range(len(rows)), key=rows.__getitem__)
    shared_counts = [common_prefix(rows[i], rows[j]) for i, j in pairwise(order)]
    return order, [0, *shared_counts]


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns how many of their first tokens two rows share in a pack, rounded down to a multiple of GRANULE.

    For the tokens that many rows share, pass the first and the last of them in alphabetical order.
    """
    equal_pairs = takewhile(lambda pair: pair[0] == pair[1], zip(first, second))
    count = sum(1 for _ in equal_pairs)
    return count // GRANULE * GRANULE
