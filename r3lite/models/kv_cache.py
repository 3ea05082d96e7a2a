"""The KV cache of a batch of sequences, and the attention contexts of the passes that fill it.

What a layer carries from token to token depends on its kind, see `carried`. In a layer with attention a token's slot
is its position: a row's slots 0 .. length-1 hold the keys and values of all its tokens so far. A `Prefill` gives each
row many tokens. A `Decode` gives each row one, or in a CUDA graph with drafts several, all rows the same number. A
`verification.Verification` gives each row a token and its drafts, in different numbers.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from r3lite.models.attention import StretchMasks, aligned, grouped_attention, masked_keys
from r3lite.models.carried import Carried, KeysValues, PrefillSlots, Ring, RingSlots, RowPart
from r3lite.models.causal_lm import CausalLM
from r3lite.models.delta_rows import DeltaPass, DeltaRows, RowTokens
from r3lite.models.gated_delta import DeltaHeads, DeltaInputs

BLOCK = 128  # slots are added in blocks, so that growing is rare and wastes little
# On a CPU, one attention operation for each row is faster than one for all rows if the rows have more empty slots than
# this on average. Measured with the heads of 0.5B, SmolLM2-135M and the tiny model, 8 to 64 rows of 64 to 1,024 slots:
# the call of an operation takes as long as 80 to 300 slots in the operation for all rows.
ROW_COST = 192


class CachePass(ABC):
    """A pass over rows of a cache, with the plans of its layers without attention (convolutions and delta rules).

    Each plan is made when the first layer that needs it asks, and serves all later layers of the pass.
    """

    drafts = False  # whether some of the tokens are drafts, which may be taken back

    def __init__(self, cache: "KVCache"):
        self.cache = cache
        self.ring_slots: dict[int, RingSlots | PrefillSlots] = {}  # by the taps of a convolution
        self.delta_pass: DeltaPass | None = None

    @abstractmethod
    def slots_in(self, ring: Ring) -> RingSlots | PrefillSlots:
        """Returns the slots of the pass's tokens in a ring."""

    @abstractmethod
    def row_tokens(self) -> Sequence[RowTokens]:
        """Returns the new tokens of each row; not for passes of CUDA graphs, which have no delta rule."""

    def convolve(
        self,
        layer: int,
        x: Tensor,
        weight: Tensor,
    ) -> Tensor:
        """See AttentionContext: x [B, T, C] -> [B, T, C]. Writes x to the cache."""
        ring = self.cache.layers[layer]
        if ring.taps not in self.ring_slots:
            self.ring_slots[ring.taps] = self.slots_in(ring)
        out = ring.convolve(x.flatten(0, 1), weight, self.ring_slots[ring.taps])  # [N, C]
        return out.unflatten(0, x.shape[:2])

    def apply_delta_rule(
        self,
        layer: int,
        inputs: DeltaInputs,
        heads: DeltaHeads,
    ) -> Tensor:
        """See AttentionContext: inputs of [B, T] tokens -> [B, T, H D_v]. Updates the states, but not with drafts."""
        states = self.cache.layers[layer]
        if self.delta_pass is None:
            self.delta_pass = self._plan_delta_rule()
        out = states.run(inputs.flat(), self.delta_pass)  # [N, H D_v]
        return out.unflatten(0, inputs.qkv.shape[:2])

    def _plan_delta_rule(self) -> DeltaPass:
        """Returns the plan of all layers with the delta rule. Sets `KVCache.settled` to the values after the pass."""
        tokens = self.row_tokens()
        settled = self.cache.settled
        plan = DeltaPass(tokens, settled, drafts=self.drafts, device=self.cache.device)
        for row, start, count in tokens:
            settled[row] = start if self.drafts else start + count
        return plan


class Prefill(CachePass):
    """The attention context of a pass that gives tokens to several rows of a cache, laid end to end without padding.

    The constructor adds the tokens to the rows' lengths; the pass then writes their keys and values.
    """

    def __init__(self, cache: "KVCache", additions: Sequence[tuple[int, list[int]]]):
        """`additions`: pairs of a row and the tokens that are added to it."""
        super().__init__(cache)
        tokens: list[int] = []
        positions: list[int] = []
        stretches: list[tuple[int, int]] = []  # of each addition: how many tokens are cached, and how many new
        for row, new_tokens in additions:
            cached_length = cache.lengths[row]
            tokens.extend(new_tokens)
            positions.extend(range(cached_length, cached_length + len(new_tokens)))
            stretches.append((cached_length, len(new_tokens)))
        self.tokens = torch.tensor([tokens])  # [1, N], on the host
        self.positions = torch.tensor([positions]).to(cache.device, non_blocking=True)  # [1, N]
        cache.reserve(max(cached_length + T for cached_length, T in stretches))
        self.masks = StretchMasks(stretches)
        self.parts: list[RowPart] = []
        first = 0
        for (row, _), (cached_length, T) in zip(additions, stretches):
            part = RowPart(
                row=row,
                share=slice(first, first + T),
                length=cached_length + T,
            )
            self.parts.append(part)
            if cache.prefilled[row] == cached_length:  # all cached tokens came by prefills
                cache.prefilled[row] = part.length
            cache.lengths[row] = part.length
            first += T

    def attend(
        self,
        layer: int,
        q: Tensor,
        kv: Tensor,
        window: int | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """See AttentionContext: q [1, H, N, D], kv [1, 2 K, N, D] -> [1, N, H D]. Writes kv to the cache."""
        outputs = []
        masks = self.masks.of(window, q)
        for (row, share, length), mask in zip(self.parts, masks, strict=True):
            new_tokens = share.stop - share.start
            cached = self.cache.layers[layer].block[row : row + 1, :, :length]  # [1, 2 K, S, D], a view
            cached[:, :, -new_tokens:] = kv[:, :, share]
            outputs.append(grouped_attention(q[:, :, share], cached, mask, scale=scale))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def slots_in(self, ring: Ring) -> PrefillSlots:
        return ring.prefill_slots(self.parts)

    def row_tokens(self) -> list[RowTokens]:
        return [RowTokens(part.row, part.start, part.length - part.start) for part in self.parts]


class Decode(CachePass):
    """The attention context of a pass over ids [B, T]: T more tokens in each of the first B rows of a cache.

    Only the first `used` slots of a row may be attended to. T is 1, except in a CUDA graph with drafts.
    """

    def __init__(
        self,
        cache: "KVCache",
        positions: Tensor,
        used: int,
        padding: int | None = None,
        lengths: Sequence[int] = (),
    ):
        """`padding`: the position of tokens that only pad the pass, if there may be some.

        `lengths`: how many tokens each row has with its new one, on the host. With them each row reads its own keys
        only, in an operation of its own; without them one operation reads `used` slots of all rows, under a mask.
        """
        super().__init__(cache)
        self.lengths = lengths
        self.positions = positions  # [B, T]
        self.rows = cache.counting[: len(positions), None]  # [B, 1]
        self.used = used
        self.padding = padding
        self.masks: dict[tuple[int, int | None], Tensor] = {}  # by G (query heads for each key head) and the window

    def _mask(self, query_heads: int, window: int | None) -> Tensor:
        """Returns what is added to the scores of each key head: [B, 1, G T, S], or [B, 1, 1, S] if T is 1.

        `query_heads` is G, the number of query heads for each key head. A mask is made when a layer first asks for it.
        """
        if window is not None and window >= self.used:
            window = None
        if (query_heads, window) not in self.masks:
            positions = self.positions[:, None]  # [B, 1, T]
            if window is not None:
                # Tokens that pad a graph have the position of the last slot, and the `used` keys may all lie before
                # their window. But these tokens must see a key, because a softmax over no key is NaN. Their output is
                # not read.
                positions = positions.clamp(max=self.used - 1)
            mask = self.cache.mask(positions, self.used, window)  # [B, 1, T, S]
            if positions.shape[2] > 1:
                mask = mask.repeat(1, 1, query_heads, 1)
            self.masks[query_heads, window] = mask[..., : self.used]
        return self.masks[query_heads, window]

    def attend(
        self,
        layer: int,
        q: Tensor,
        kv: Tensor,
        window: int | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """See AttentionContext: q [B, H, T, D], kv [B, 2 K, T, D] -> [B, T, H D]. Writes kv to the cache."""
        B, H, T, D = q.shape
        K = kv.shape[1] // 2
        G = H // K
        cached = self.cache.layers[layer].block[:B]
        # Not scatter_: with an expanded index it takes 1.4 ms on a CPU where this takes 7 us (64 rows, one token each).
        cached[self.rows, :, self.positions] = kv.transpose(1, 2).to(cached.dtype)  # [B, T, 2 K, D]
        # The G queries that share a key head are laid end to end, so that the cache is never copied.
        q = q.reshape(B, K, G * T, D)
        if self.lengths:
            return self._attend_row_by_row(q, cached, window, scale)
        k, v = cached[:, :, : self.used].chunk(2, dim=1)  # [B, K, S, D]
        mask = self._mask(G, window)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        return out.reshape(B, H, T, D).transpose(1, 2).reshape(B, T, -1)

    def _attend_row_by_row(
        self,
        q: Tensor,
        cached: Tensor,
        window: int | None,
        scale: float | None,
    ) -> Tensor:
        """Returns the attention's output [B, 1, H D] for queries [B, K, G, D] and the cache [B, 2 K, capacity, D]."""
        outputs = []
        for row, length in enumerate(self.lengths):
            first = 0 if window is None else max(0, length - window)
            k, v = cached[row : row + 1, :, first:length].chunk(2, dim=1)  # [1, K, S, D]
            outputs.append(F.scaled_dot_product_attention(q[row : row + 1], k, v, scale=scale))
        return torch.cat(outputs).reshape(len(outputs), 1, -1)

    def slots_in(self, ring: Ring) -> RingSlots:
        rows = self.rows.expand_as(self.positions)  # [B, T]
        return ring.slots_of(rows.flatten(), self.positions.flatten(), self.padding)

    def row_tokens(self) -> list[RowTokens]:
        lengths = self.cache.lengths[: len(self.positions)]
        return [RowTokens(row, length - 1, 1) for row, length in enumerate(lengths)]


class KVCache:
    """What the layers carry for `rows` sequences; the capacity grows as tokens are added."""

    def __init__(self, layers: Sequence[Carried], rows: int, dtype: torch.dtype, device: torch.device):
        """`layers`: for each layer, what it carries in all rows."""
        self.layers = layers
        self.dtype = dtype
        self.device = device
        self.capacity = 0  # tokens of a row
        self.lengths = [0] * rows  # on the host: reading them from the device would wait for it
        self.prefilled = [0] * rows  # for each row, how many tokens prefills added before the first decoded token
        # For each row, how many of its tokens the delta rule's states have taken in; used only if layers have a rule.
        self.settled = [0] * rows
        # Tensors that each step of decoding would otherwise make anew: the numbers 0, 1, 2 .. of rows and slots, and
        # the two numbers of a mask.
        self.counting = torch.arange(rows, device=device)
        scores = torch.tensor([-math.inf, 0.0], dtype=dtype).to(device, non_blocking=True)
        self.masked_score, self.visible_score = scores

    @staticmethod
    def of(model: CausalLM, rows: int) -> "KVCache":
        """Returns an empty cache for `rows` sequences of a model, in its dtype and on its device."""
        config = model.config
        dtype = model.head_weight.dtype
        device = model.head_weight.device
        layers: list[Carried] = []
        for layer in range(config.num_hidden_layers):
            kind = config.kind(layer)
            if kind.delta is not None:
                layers.append(DeltaRows(rows, kind.delta, kind.taps, dtype=dtype, device=device))
            elif kind.taps:
                layers.append(Ring(rows, config.hidden_size, kind.taps, dtype=dtype, device=device))
            else:
                keys_values = KeysValues(
                    rows,
                    config.num_key_value_heads,
                    config.head_dim,
                    dtype=dtype,
                    device=device,
                )
                layers.append(keys_values)
        return KVCache(layers, rows, dtype=dtype, device=device)

    def reserve(self, slots: int) -> None:
        """Makes the cache large enough for `slots` tokens a row.

        It grows one layer at a time, so that only one layer's old and new memory exist together.
        """
        capacity = -(-slots // BLOCK) * BLOCK
        if capacity <= self.capacity:
            return
        rows = max((row + 1 for row, length in enumerate(self.lengths) if length > 0), default=0)
        for layer in self.layers:
            layer.reserve(capacity, rows)
        self.capacity = capacity
        self.counting = torch.arange(max(len(self.lengths), capacity), device=self.device)

    def decode(self, rows: int) -> Decode:
        """Adds 1 to the lengths of the first `rows` rows; returns the context of the pass over their new tokens."""
        positions = self.lengths[:rows]  # a new token's position is its row's old length
        used = max(positions) + 1
        self.reserve(used)
        self.lengths[:rows] = [position + 1 for position in positions]
        positions_on_device = torch.tensor(positions).to(self.device, non_blocking=True)
        lengths: list[int] = []
        if self.device.type == "cpu":
            empty_slots = used * rows - sum(self.lengths[:rows])
            if empty_slots > ROW_COST * rows:
                lengths = self.lengths[:rows]
        return Decode(self, positions_on_device[:, None], used, lengths=lengths)

    def mask(
        self,
        positions: Tensor,
        used: int,
        window: int | None,
    ) -> Tensor:
        """Returns what is added to the scores [B, 1, T, S] of queries at positions [B, 1, T] and the first S keys.

        S is at least `used`, and such that the mask's rows are aligned, see attention.ALIGNMENT. For `window` see
        attention.masked_keys.
        """
        is_masked = masked_keys(positions, self.counting[: aligned(used)], window)
        return torch.where(is_masked, self.masked_score, self.visible_score)

    def truncate(self, row: int, length: int) -> None:
        """Makes a row end after its first `length` tokens, as if those behind them had never been run.

        Either drafts are taken back, at most MOST_DRAFTED tokens, or all tokens of the row: a `Ring` keeps no earlier
        values. Numbers behind the new end may stay in memory, see `wipe`.
        """
        assert length == 0 or length >= self.settled[row], "of a state only drafts, or all tokens, can be taken back"
        for layer in self.layers:
            layer.truncate(row, length, self.lengths[row])
        self.lengths[row] = length
        self.prefilled[row] = min(self.prefilled[row], length)
        self.settled[row] = min(self.settled[row], length)

    def wipe(self, row: int) -> None:
        """Sets to zero what is stored behind a row's tokens, if a NaN there could reach a later result."""
        for layer in self.layers:
            layer.wipe(row, self.lengths[row])

    def copyable(
        self,
        row: int,
        count: int,
        prefilled: int | None = None,
    ) -> int:
        """Returns the longest prefix of at most `count` tokens that `copy` can take from a row.

        With `prefilled`, the answer is for a later time, when the row will have `prefilled` tokens, all by prefills.
        """
        if prefilled is None:
            length = self.lengths[row]
            prefilled = self.prefilled[row]
        else:
            length = prefilled
        for layer in self.layers:
            count = layer.copyable(count, length=length, prefilled=prefilled)
        return count

    def copy(
        self,
        source: int,
        target: int,
        count: int,
    ) -> None:
        """Makes the row `target` hold the first `count` tokens of the row `source`, which are `copyable`."""
        for layer in self.layers:
            layer.copy(source, target, count=count, length=self.lengths[source])
        self.lengths[target] = count
        self.prefilled[target] = min(self.prefilled[source], count)
        self.settled[target] = min(self.settled[source], count)

    def keep_prefix(self, row: int, count: int) -> None:
        """Makes a row end after its longest `copyable` prefix of at most `count` tokens."""
        self.copy(row, row, self.copyable(row, count))

    def clear(self, row: int) -> None:
        """Makes a row as it was when nothing had been written to it."""
        for layer in self.layers:
            layer.clear(row)
        self.lengths[row] = 0
        self.prefilled[row] = 0
        self.settled[row] = 0

    def swap(self, i: int, j: int) -> None:
        """Exchanges two rows."""
        if i == j:
            return
        used = max(self.lengths[i], self.lengths[j])
        for layer in self.layers:
            layer.swap(i, j, used)
        for counts in (self.lengths, self.prefilled, self.settled):
            counts[i], counts[j] = counts[j], counts[i]
