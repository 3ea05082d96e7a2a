"""Packs: rows of tokens laid end to end without padding, where a prefix that several rows share is computed once.

A pack's rows form a tree. A segment is a stretch of tokens that some rows have in common; a token attends to the tokens
before it in its segment and to the segments on the way to the root. Hidden states, and so gradients, are those of the
rows by themselves, because no token attends to what comes after it. Knows nothing of losses.
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

GRANULE = 16  # prefixes are shared in multiples of this many tokens: fewer are not worth an attention of their own


@dataclass(frozen=True)
class Segment:
    """One of a pack's segments, which together are its N tokens in order."""

    size: int  # tokens
    ancestors: tuple[int, ...]  # the numbers of the segments on the way from the root to this one, the nearest last


@dataclass(frozen=True)
class Pack:
    """The tokens of several rows, N in all; the attention context of a pass over them."""

    tokens: Tensor  # [1, N], on the host
    positions: Tensor  # [1, N]
    segments: list[Segment]
    masks: StretchMasks  # of the segments
    places: list[list[int]]  # for each row, where its tokens are among the N

    @staticmethod
    def of(rows: Sequence[Sequence[int]], device: torch.device) -> "Pack":
        """Packs rows of token ids."""
        order, shared = _sorted(rows)
        tokens: list[int] = []
        positions: list[int] = []
        spans: list[range] = []  # for each segment, where its tokens are among the N
        ancestors: list[tuple[int, ...]] = []  # of each segment
        places: list[list[int]] = [[]] * len(rows)

        def lay_out(
            first: int,
            last: int,
            depth: int,
            path: tuple[int, ...],
        ) -> None:
            """Lays out rows first .. last - 1 of `order`, whose first `depth` tokens are in the segments `path`."""
            row = rows[order[first]]
            end = min(shared[first + 1 : last], default=len(row))
            if end > depth:
                spans.append(range(len(tokens), len(tokens) + end - depth))
                ancestors.append(path)
                tokens.extend(row[depth:end])
                positions.extend(range(depth, end))
                path = (*path, len(spans) - 1)
            if last == first + 1:
                places[order[first]] = [place for number in path for place in spans[number]]
                return
            # A branch begins at each row that has no more than `end` tokens in common with the row before it.
            branches = [i for i in range(first + 1, last) if shared[i] == end]
            for branch_first, branch_last in pairwise([first, *branches, last]):
                lay_out(branch_first, branch_last, depth=end, path=path)

        if rows:
            lay_out(0, len(rows), depth=0, path=())
        stretches = [(positions[span.start], len(span)) for span in spans]
        segments = [Segment(size=len(span), ancestors=path) for span, path in zip(spans, ancestors, strict=True)]
        # Copied from the host without waiting for what the device is still doing.
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
        # Split, not sliced: the gradient of each slice is a tensor of all N tokens, nearly all of them zeros.
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
        count = weight.shape[1] - 1
        assert count <= GRANULE, "a segment that others follow has at least so many tokens"
        values = x.split([segment.size for segment in self.segments], dim=1)
        ends = [of_segment[:, of_segment.shape[1] - count :] for of_segment in values]
        outputs = []
        for segment, of_segment in zip(self.segments, values, strict=True):
            if segment.ancestors:
                seen = torch.cat((ends[segment.ancestors[-1]], of_segment), dim=1)
            else:
                seen = preceded_by_zeros(of_segment, weight)
            outputs.append(causal_convolution(seen, weight))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    @cached_property
    def plan(self) -> ChunkPlan:
        """How a gated delta rule runs the segments: each starts from the state at the end of its nearest ancestor."""
        parents = [segment.ancestors[-1] if segment.ancestors else None for segment in self.segments]
        return ChunkPlan([segment.size for segment in self.segments], parents, self.positions.device)

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
        """Returns the places [n] of the states that predict the tokens that the rows' masks select, and these tokens.

        Both are [n], in the order of rows and tokens. A row's first token is left out: no state comes before it. A
        token that several rows share comes once for each row whose mask selects it.
        """
        ids = self.tokens[0].tolist()
        pairs = []
        for row_places, mask in zip(self.places, masks, strict=True):
            for t in range(1, len(row_places)):
                if mask[t]:
                    pairs.append((row_places[t - 1], ids[row_places[t]]))
        columns = torch.tensor(pairs, dtype=torch.long).view(-1, 2)
        states, targets = columns.to(self.positions.device, non_blocking=True).unbind(1)
        return states, targets


def states_before(
    model: CausalLM, rows: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]]
) -> tuple[Tensor, Tensor]:
    """Runs a model over rows in one pack.

    Returns the states [n, C] that predict the tokens that the rows' masks select, and these tokens [n].
    """
    pack = Pack.of(rows, model.head_weight.device)
    places, tokens = pack.predicted(masks)
    return states_at(model(pack.tokens, pack), places), tokens


def states_at(hidden: Tensor, places: Tensor) -> Tensor:
    """Returns the states [n, C] at `places` [n] of a pack's `hidden` [1, N, C]; a place may come several times."""
    # Not hidden[0, places]: several CPU threads add up the gradient of indexing in the order in which they come to it,
    # so that two equal runs would differ in the last digits. The gradient of an embedding is added up in a fixed order,
    # and faster.
    return F.embedding(places, hidden[0])


def pack_rows(
    rows: Sequence[Sequence[int]],
    max_tokens: int,
    max_rows: int,
) -> list[list[int]]:
    """Returns the indices of rows in packs of at most `max_rows` rows and `max_tokens` tokens.

    A row with more tokens is a pack of its own. Rows with a common prefix stay together.
    """
    order, shared = _sorted(rows)
    packs: list[list[int]] = []
    pack_tokens = 0
    for i, shared_tokens in zip(order, shared):
        new_tokens = len(rows[i]) - shared_tokens
        if not packs or len(packs[-1]) == max_rows or pack_tokens + new_tokens > max_tokens:
            packs.append([])
            pack_tokens = 0
            new_tokens = len(rows[i])
        packs[-1].append(i)
        pack_tokens += new_tokens
    return packs


def _sorted(rows: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Returns the rows' indices in alphabetical order, and how many tokens each row shares with the one before it.

    In this order rows with a common prefix are neighbours, so every token of the tree is new in one row only.
    """
    if not rows:
        return [], []
    order = sorted(range(len(rows)), key=rows.__getitem__)
    shared = [common_prefix(rows[i], rows[j]) for i, j in pairwise(order)]
    return order, [0, *shared]


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns how many tokens at their beginning two rows share in a pack, a multiple of GRANULE.

    Of many rows in alphabetical order, the first and the last share what all share.
    """
    equal_pairs = takewhile(lambda pair: pair[0] == pair[1], zip(first, second))
    count = sum(1 for _ in equal_pairs)
    return count // GRANULE * GRANULE
