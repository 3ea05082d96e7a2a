"""What LFM2 (arXiv 2511.23404; `lfm2`) has of its own: short convolutions, names, and its config.

In most layers a gated short convolution stands in place of the attention. Such a layer computes W_out (c conv(b v))
with (b, c, v) = W_in x, three vectors side by side; `conv` sees a token and the few before it, each channel by itself.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from r3lite.core.records import Record, shown
from r3lite.models.attention import AttentionContext
from r3lite.models.causal_lm import MLP, Attention, Layer, LayerKind, ModelConfig, Trunk
from r3lite.models.layer_kinds import FULL, unsupported
from r3lite.models.projections import project

CONVOLUTION = "conv"
TAPS = 3
MAX_TAPS = 16
# The values of keys that a config.json may leave out.
SIZES = {
    "vocab_size": 65_536, "intermediate_size": 12_288, "num_key_value_heads": 8, "max_position_embeddings": 128_000,
}  # fmt: skip
THETA = 1_000_000.0
EPS = 1e-5
MULTIPLE = 256
NAMES = {  # of the decoder's parts, in published checkpoints
    "norm": "embedding_norm",
    "input_layernorm": "operator_norm", "post_attention_layernorm": "ffn_norm", "mlp": "feed_forward",
    "q_norm": "q_layernorm", "k_norm": "k_layernorm", "o_proj": "out_proj",
    "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2",
}  # fmt: skip


class Renamed(nn.Module):
    """A part of the decoder whose children have other names in this family's checkpoints than in the others'."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        for name in list(self._modules):
            self.add_module(NAMES.get(name, name), self._modules.pop(name))

    def __getattr__(self, name: str):
        """Returns a child by the decoder's name or its own. Python calls this if a name is no plain attribute."""
        return super().__getattr__(NAMES.get(name, name))


class Lfm2Attention(Renamed, Attention):
    """Attention with norms of each query and key head."""


class Lfm2MLP(Renamed, MLP):
    """The feed-forward network."""


class ShortConvolution(nn.Module):
    """The gated short convolution of one layer; the context of a pass supplies the tokens before each token."""

    def __init__(self, config: ModelConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        size = config.hidden_size
        self.in_proj = nn.Linear(size, 3 * size, bias=False)
        self.conv = nn.Conv1d(size, size, config.kind(layer_idx).taps, groups=size, bias=False)
        self.out_proj = nn.Linear(size, size, bias=False)

    def forward(
        self,
        x: Tensor,
        context: AttentionContext,
        residual: Tensor,
    ) -> Tensor:
        """Returns the convolution's output for x [B, T, C], plus the residual [B, T, C]."""
        gate_before, gate_after, values = project((self.in_proj,), x).chunk(3, dim=-1)
        weight = self.conv.weight[:, 0]  # [C, taps]
        out = context.convolve(self.layer_idx, gate_before * values, weight)
        return project((self.out_proj,), gate_after * out, residual)


class Lfm2Layer(Renamed, Layer):
    """A layer with an attention or a short convolution."""

    def __init__(self, config: ModelConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.feed_forward = Lfm2MLP(config)
        self.is_convolution = config.kind(layer_idx).taps > 0
        if self.is_convolution:
            del self.self_attn
            self.conv = ShortConvolution(config, layer_idx)
        else:
            self.self_attn = Lfm2Attention(config, layer_idx)

    def first_half(
        self,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        context: AttentionContext,
    ) -> Tensor:
        if self.is_convolution:
            return self.conv(self.operator_norm(x), context, residual=x)
        return super().first_half(x, cos, sin, context=context)


class Lfm2Trunk(Renamed, Trunk):
    """Embedding, layers and final norm."""


def lfm2(record: Record, config: ModelConfig) -> ModelConfig:
    """Returns the config with the kinds of the layers, and with the keys that only this family has."""
    if record.flag("conv_bias", False):
        raise unsupported(record, "conv_bias is true", "Only false is supported.")
    taps = record.whole("conv_L_cache", TAPS, low=2, high=MAX_TAPS)
    convolution = LayerKind(rope=None, taps=taps)
    attention = config.kind(0)
    kinds = []
    for name in _layer_types(record, config.num_hidden_layers):
        if name not in (CONVOLUTION, FULL):
            raise unsupported(record, f"layer_types has {shown(name)}", f"Supported are {CONVOLUTION} and {FULL}.")
        kinds.append(convolution if name == CONVOLUTION else attention)
    return replace(
        config,
        intermediate_size=_intermediate_size(record, config.intermediate_size),
        rms_norm_eps=record.number("norm_eps", EPS, low=0, high=1, above=True),
        tie_word_embeddings=record.flag("tie_embedding", config.tie_word_embeddings),
        layer_kinds=tuple(kinds),
        layer=Lfm2Layer,
        trunk=Lfm2Trunk,
    )


def _layer_types(record: Record, layers: int) -> Sequence[str]:
    """Returns the kind of each layer; older files list the numbers of the layers with attention in `full_attn_idxs`."""
    types = record.texts("layer_types", ())
    if types:
        if len(types) != layers:
            raise record.error(f"layer_types has {len(types)} layers, but num_hidden_layers is {layers}")
        return types
    attending = record.items("full_attn_idxs", list(range(layers)))
    return [FULL if layer in attending else CONVOLUTION for layer in range(layers)]


def _intermediate_size(record: Record, size: int) -> int:
    """Returns the width of the feed-forward networks.

    It is the size in the file or, with `block_auto_adjust_ff_dim`, two thirds of that size times a factor, rounded up
    to a multiple of `block_multiple_of`.
    """
    size = record.whole("block_ff_dim", size, low=1, high=1 << 20)
    if not record.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    multiplier = record.number("block_ffn_dim_multiplier", 1.0, low=0, high=1e6, above=True)
    size = int(multiplier * size)
    multiple = record.whole("block_multiple_of", MULTIPLE, low=1, high=1 << 20)
    return -(-size // multiple) * multiple
