"""Rows of tokens laid end to end in one: none is padded, and a prefix that several rows share is computed once.

A pack's rows form a tree. A segment is a stretch of tokens that some rows have in common; its tokens attend to those
before them in it and to the segments on the way to the root. Hidden states, and so gradients, are those of the rows by
themselves, because no token attends to what comes after it. Knows nothing of losses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

import torch
import torch.nn.functional as F
from torch import Tensor

from r3lite.models.attention import causal_masks, grouped_attention
from r3lite.models.causal_lm import CausalLM

GRANULE = 16  # prefixes are shared in multiples of this many tokens: fewer are not worth an attention of their own


@dataclass(frozen=True)
class Segment:
    """One of a pack's segments, which together are its N tokens in order."""

    size: int  # tokens
    before: tuple[int, ...]  # the segments on the way from the root, by their numbers
    mask: Tensor | None  # [size, before + size], added to scores; None: causal, nothing comes before


@dataclass(frozen=True)
class Pack:
    """The tokens of several rows, N in all; the attention context of a pass over them."""

    tokens: Tensor  # [1, N], on the host
    positions: Tensor  # [1, N]
    segments: list[Segment]
    places: list[list[int]]  # for each row, where its tokens are among the N

    @staticmethod
    def of(rows: Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype) -> "Pack":
        """Packs rows of token ids; `dtype` is that of the queries that will attend."""
        order, shared = _sorted(rows)
        tokens: list[int] = []
        positions: list[int] = []
        found: list[tuple[slice, tuple[int, ...]]] = []
        places: list[list[int]] = [[]] * len(rows)

        def grow(first: int, last: int, depth: int, before: tuple[int, ...]) -> None:
            """Lays out rows first .. last - 1 in order, which share `depth` tokens, the segments `before`."""
            row = rows[order[first]]
            end = min(shared[first + 1 : last], default=len(row))
            if end > depth:
                own = slice(len(tokens), len(tokens) + end - depth)
                tokens.extend(row[depth:end])
                positions.extend(range(depth, end))
                found.append((own, before))
                before = (*before, len(found) - 1)
            if last == first + 1:
                way = [found[number][0] for number in before]
                places[order[first]] = [i for own in way for i in range(own.start, own.stop)]
                return
            for a, b in pairwise([first, *(i for i in range(first + 1, last) if shared[i] == end), last]):
                grow(a, b, end, before)

        if rows:
            grow(0, len(rows), 0, ())
        masks = causal_masks([(positions[own.start], own.stop - own.start) for own, _ in found], device, dtype)
        segments = [
            Segment(own.stop - own.start, before, mask) for (own, before), mask in zip(found, masks, strict=True)
        ]
        # From the host without waiting for what the device is still doing.
        return Pack(torch.tensor([tokens]), torch.tensor([positions]).to(device, non_blocking=True), segments, places)

    def attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """See AttentionContext: q [1, H, N, D], kv [1, 2 K, N, D] -> [1, N, H D]."""
        # Split, not sliced: the gradient of each slice is a tensor of all N tokens, nearly all of them zeros.
        sizes = [segment.size for segment in self.segments]
        queries, own = q.split(sizes, dim=2), kv.split(sizes, dim=2)
        parts = []
        for i, segment in enumerate(self.segments):
            seen = torch.cat([own[j] for j in (*segment.before, i)], dim=2) if segment.before else own[i]
            parts.append(grouped_attention(queries[i], seen, segment.mask))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def predicted(self, chosen: Sequence[Sequence[bool]]) -> tuple[Tensor, Tensor]:
        """For each chosen token of the rows: the place of the state that predicts it [n], and its id [n].

        In the order of rows and tokens. A row's first token is left out: no state comes before it. A token that several
        rows share comes once for each row that chooses it.
        """
        ids = self.tokens[0].tolist()
        pairs = [
            (place[t - 1], ids[place[t]])
            for place, row in zip(self.places, chosen, strict=True)
            for t in range(1, len(place))
            if row[t]
        ]
        found = torch.tensor(pairs, dtype=torch.long).view(-1, 2).to(self.positions.device, non_blocking=True)
        before, own = found.unbind(1)
        return before, own


def states_before(
    model: CausalLM, rows: Sequence[Sequence[int]], chosen: Sequence[Sequence[bool]]
) -> tuple[Tensor, Tensor]:
    """Runs a model over rows in one pack: the states [n, C] that predict the chosen tokens, and these tokens [n]."""
    pack = Pack.of(rows, model.head_weight.device, model.head_weight.dtype)
    places, tokens = pack.predicted(chosen)
    return states_at(model(pack.tokens, pack), places), tokens


def states_at(hidden: Tensor, places: Tensor) -> Tensor:
    """The hidden states [n, C] at `places` [n] of a pack's, which are [1, N, C]; a place may come several times."""
    # Not hidden[0, places]: several CPU threads add up the gradient of indexing in the order in which they come to it,
    # so that two equal runs would differ in the last digits. An embedding's has a fixed order, and is faster.
    return F.embedding(places, hidden[0])


def groups(rows: Sequence[Sequence[int]], tokens: int, most: int) -> list[list[int]]:
    """Indices of rows in groups of at most `most`, each group's pack of at most `tokens`; a longer row forms its own.

    Rows with a common prefix stay together.
    """
    order, shared = _sorted(rows)
    made: list[list[int]] = []
    size = 0
    for i, common in zip(order, shared):
        own = len(rows[i]) - common
        if not made or len(made[-1]) == most or size + own > tokens:
            made.append([])
            size, own = 0, len(rows[i])
        made[-1].append(i)
        size += own
    return made


def _sorted(rows: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """The rows' indices in alphabetical order, and how many tokens each row shares with the one before it.

    In this order rows with a common prefix are neighbours, so every token of the tree is new in one row only.
    """
    order = sorted(range(len(rows)), key=rows.__getitem__)
    return order, [0] * bool(rows) + [common_prefix(rows[i], rows[j]) for i, j in pairwise(order)]


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens at their beginning two rows share in a pack, a multiple of GRANULE.

    Of many rows in alphabetical order, the first and the last share what all share.
    """
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other))) // GRANULE * GRANULE
