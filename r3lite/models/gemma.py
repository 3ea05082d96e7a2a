"""What Gemma 3 (arXiv 2503.19786; `gemma3_text`) has of its own: norms, a layer with four of them, and its config."""

import math
from dataclasses import replace

from torch import Tensor, nn

from r3lite.core.records import Record, shown
from r3lite.models.attention import AttentionContext
from r3lite.models.causal_lm import Layer, LayerKind, ModelConfig, RMSNorm
from r3lite.models.functions import geglu, rms_norm
from r3lite.models.layer_kinds import FULL, SLIDING, sliding_layers, unsupported
from r3lite.models.rotary import LinearScaling, Rope

# What a config.json need not say; the files of the larger models leave out most of it.
SIZES = {
    "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072,
}  # fmt: skip
HEAD_DIM = 256
WINDOW = 4096
PATTERN = 6  # every sixth layer attends to all tokens
LOCAL_THETA = 10_000.0  # of layers with a window
THETA = 1_000_000.0
LAYERS_27B = 62
UNSUPPORTED = ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention")


class ZeroCentredRMSNorm(RMSNorm):
    """RMSNorm that multiplies by 1 + weight."""

    def __init__(self, size: int, eps: float):
        super().__init__(size, eps)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, offset=1.0)


class GemmaLayer(Layer):
    """A layer with norms before and after its attention and its feed-forward network."""

    def __init__(self, config: ModelConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.pre_feedforward_layernorm = config.norm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = config.norm(config.hidden_size, config.rms_norm_eps)

    def first_half(
        self,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        context: AttentionContext,
    ) -> Tensor:
        out = self.self_attn(self.input_layernorm(x), cos, sin, context=context, residual=None)
        return x + self.post_attention_layernorm(out)

    def second_half(self, x: Tensor, tile: int | None = None) -> Tensor:
        out = self.mlp(self.pre_feedforward_layernorm(x), residual=None, tile=tile)
        return x + self.post_feedforward_layernorm(out)


def gemma3_text(record: Record, config: ModelConfig) -> ModelConfig:
    """Returns the config with all that is Gemma's; layers with a window have a rotary base of their own."""
    for key in UNSUPPORTED:
        if record.values.get(key):
            raise unsupported(record, f"{key} is {shown(record.values[key])}", "Only null is supported.")
    pattern = record.whole("sliding_window_pattern", PATTERN, low=1)
    sliding = sliding_layers(record, config, lambda layer: (layer + 1) % pattern != 0)
    of_window, of_all = _kinds(record)
    return replace(
        config,
        layer_kinds=tuple(of_window if slides else of_all for slides in sliding),
        rope_theta=of_all.rope.theta,
        attention_scale=record.number("query_pre_attn_scalar", HEAD_DIM, low=0, high=1e9, above=True) ** -0.5,
        embedding_multiplier=math.sqrt(config.hidden_size),
        rounds_multiplier=True,
        norm=ZeroCentredRMSNorm,
        activation=geglu,
        layer=GemmaLayer,
    )


def attention_width(layers: int, head_dim: int, hidden_per_head: float) -> float:
    """Returns `query_pre_attn_scalar` of the published models: the size of a head, except in the model of 27B."""
    if layers == LAYERS_27B:
        return hidden_per_head
    return head_dim


def _kinds(record: Record) -> tuple[LayerKind, LayerKind]:
    """Returns the kinds of layers with a window and of those without one.

    transformers 5 has the ropes in `rope_parameters`, 4 in keys of their own.
    """
    ropes = record.record("rope_parameters")
    full = ropes.record(FULL)
    local = ropes.record(SLIDING)
    for name, rope, supported in ((SLIDING, local, ("default",)), (FULL, full, ("default", "linear"))):
        rope_type = _rope_type(rope)
        if rope_type not in supported:
            fault = f"rope_type of {name} is {shown(rope_type)}"
            raise unsupported(record, fault, f"Supported: {', '.join(supported)}.")
    scaling = None
    for rope in (record.record("rope_scaling"), full):  # of transformers 4 and 5; the record of a missing key is empty
        if _rope_type(rope) == "linear":  # of other types a factor means nothing
            scaling = LinearScaling(rope.number("factor", low=1, high=1e6))
    local_theta = _theta(local, record, "rope_local_base_freq", LOCAL_THETA)
    full_theta = _theta(full, record, "rope_theta", THETA)
    of_window = LayerKind(Rope(local_theta), record.whole("sliding_window", WINDOW, low=1))
    return of_window, LayerKind(Rope(full_theta, scaling))


def _rope_type(rope: Record) -> str:
    return rope.text(rope.first("rope_type", "type"), "default")


def _theta(
    rope: Record,
    record: Record,
    key: str,
    default: float,
) -> float:
    if "rope_theta" in rope:
        return rope.number("rope_theta", low=0, high=1e12, above=True)
    return record.number(key, default, low=0, high=1e12, above=True)
