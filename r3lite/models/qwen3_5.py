"""What Qwen3.5 (`qwen3_5_text`) has of its own: layers with the gated delta rule, attention with gates, its config.

Three layers of four have no attention. They carry a state (models/gated_delta.py) and the last inputs of a short
convolution in place of the keys and values of all tokens.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from r3lite.core.records import Record, shown
from r3lite.models.attention import AttentionContext
from r3lite.models.causal_lm import Attention, Layer, LayerKind, ModelConfig
from r3lite.models.functions import rms_norm, rotate_
from r3lite.models.gated_delta import DeltaHeads, DeltaInputs
from r3lite.models.gemma import ZeroCentredRMSNorm
from r3lite.models.layer_kinds import FULL, unsupported
from r3lite.models.projections import project
from r3lite.models.rotary import Rope

LINEAR = "linear_attention"
# The values of keys that a config.json may leave out.
SIZES = {
    "vocab_size": 248_320, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32,
    "num_attention_heads": 16, "num_key_value_heads": 4,
}  # fmt: skip
HEAD_DIM = 256
INTERVAL = 4  # every fourth layer has attention
ROTARY_SHARE = 0.25  # the part of a head that is rotated
KERNEL = 4  # tokens that the convolution sees
KEY_HEADS = 16
VALUE_HEADS = 32
DELTA_DIM = 128  # of a key, and of a value
LARGEST = 1 << 12  # a config.json with a larger number of heads or size of a head is refused
MAX_TAPS = 16  # a config.json with a longer convolution is refused


class GatedAttention(Attention):
    """Attention whose output is multiplied by the sigmoid of a gate, which q_proj computes beside each query."""

    def __init__(self, config: ModelConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        size = 2 * self.heads * self.head_dim  # of queries and gates
        self.q_proj = nn.Linear(config.hidden_size, size, bias=config.qkv_bias)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        context: AttentionContext,
        residual: Tensor | None,
    ) -> Tensor:
        projected = project((self.q_proj, self.k_proj, self.v_proj), x)
        projected = projected.unflatten(-1, (-1, self.head_dim))  # [B, T, 2H+2K, D]
        q_and_gate, k, v = projected.split((2 * self.heads, self.kv_heads, self.kv_heads), dim=2)
        q, gate = q_and_gate.unflatten(2, (-1, 2)).unbind(3)  # [B, T, H, D] each: a head's query, then its gate
        qkv = torch.cat((self.q_norm(q), self.k_norm(k), v), dim=2)
        qkv = rotate_(qkv, heads=self.heads + self.kv_heads, cos=cos, sin=sin)
        q, kv = qkv.transpose(1, 2).split((self.heads, 2 * self.kv_heads), dim=1)
        out = context.attend(self.layer_idx, q, kv)  # [B, T, H D]; these layers have no window and the usual scale
        out = out * torch.sigmoid(gate.flatten(2))
        return project((self.o_proj,), out, residual)


class GatedDeltaNet(nn.Module):
    """The gated delta rule of one layer, between its projections (arXiv 2412.06464, section 3.4)."""

    def __init__(self, config: ModelConfig, layer_idx: int):
        super().__init__()
        kind = config.kind(layer_idx)
        assert kind.delta is not None
        self.layer_idx = layer_idx
        self.heads = kind.delta
        hidden = config.hidden_size
        mixed = sum(self.heads.sizes)  # numbers of a token's queries, keys and values
        values = self.heads.sizes[2]
        self.in_proj_qkv = nn.Linear(hidden, mixed, bias=False)
        self.in_proj_z = nn.Linear(hidden, values, bias=False)
        self.in_proj_b = nn.Linear(hidden, self.heads.value_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, self.heads.value_heads, bias=False)
        self.conv1d = nn.Conv1d(mixed, mixed, kind.taps, groups=mixed, bias=False)
        self.dt_bias = nn.Parameter(torch.ones(self.heads.value_heads))
        self.A_log = nn.Parameter(torch.zeros(self.heads.value_heads))
        self.norm = GatedRMSNorm(self.heads.value_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(values, hidden, bias=False)

    def forward(
        self,
        x: Tensor,
        context: AttentionContext,
        residual: Tensor | None,
    ) -> Tensor:
        """Returns the output for x [B, T, C], plus the residual [B, T, C] if there is one."""
        value_heads = self.heads.value_heads
        projected = project((self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a), x)
        sizes = (sum(self.heads.sizes), self.heads.sizes[2], value_heads, value_heads)
        qkv, z, b, a = projected.split(sizes, dim=-1)
        qkv = F.silu(context.convolve(self.layer_idx, qkv, self.conv1d.weight[:, 0]))
        # The decay is exp(-exp(A_log) softplus(a + dt_bias)), as in Mamba2 (arXiv 2405.21060).
        rate = self.A_log.float().exp()
        log_decay = F.softplus(a.float() + self.dt_bias.float()) * -rate
        inputs = DeltaInputs(qkv, log_decay, strength=b.sigmoid())
        out = context.apply_delta_rule(self.layer_idx, inputs, self.heads)  # [B, T, H D_v]
        return project((self.out_proj,), self.norm(out, z), residual)


class GatedRMSNorm(nn.Module):
    """RMSNorm of each head, times the silu of a gate."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Returns the norm of x [..., H D], head by head, gated by `gate` [..., H D]."""
        by_head = x.unflatten(-1, (-1, len(self.weight)))  # [..., H, D]
        normalized = rms_norm(by_head, self.weight, self.eps)
        return F.silu(gate) * normalized.flatten(-2)


class Qwen35Layer(Layer):
    """A layer with the gated delta rule, or with gated attention."""

    def __init__(self, config: ModelConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.linear_attn: GatedDeltaNet | None = None
        if config.kind(layer_idx).delta:
            del self.self_attn
            self.linear_attn = GatedDeltaNet(config, layer_idx)
        else:
            self.self_attn = GatedAttention(config, layer_idx)

    def first_half(
        self,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        context: AttentionContext,
    ) -> Tensor:
        if self.linear_attn is None:
            return super().first_half(x, cos, sin, context=context)
        return self.linear_attn(self.input_layernorm(x), context=context, residual=x)


def qwen3_5_text(record: Record, config: ModelConfig) -> ModelConfig:
    """Returns the config with the kinds of its layers, by `layer_types` or else by `full_attention_interval`."""
    if not record.flag("attn_output_gate", True):
        raise unsupported(record, "attn_output_gate is false", "Only true is supported.")
    layers = config.num_hidden_layers
    interval = record.whole("full_attention_interval", INTERVAL, low=1)
    types = record.texts("layer_types", ())
    if not types:
        types = [FULL if (layer + 1) % interval == 0 else LINEAR for layer in range(layers)]
    unknown = next((name for name in types if name not in (LINEAR, FULL)), None)
    if unknown is not None:
        raise unsupported(record, f"layer_types has {shown(unknown)}", f"Supported are {LINEAR} and {FULL}.")
    if len(types) != layers:
        raise record.error(f"layer_types has {len(types)} layers, but num_hidden_layers is {layers}")
    taps = record.whole("linear_conv_kernel_dim", KERNEL, low=2, high=MAX_TAPS)
    linear = LayerKind(rope=None, taps=taps, delta=_delta_heads(record))
    full = LayerKind(Rope(config.rope_theta, dims=_rotary_dims(record, config.head_dim)))
    return replace(
        config,
        layer_kinds=tuple(full if name == FULL else linear for name in types),
        norm=ZeroCentredRMSNorm,
        layer=Qwen35Layer,
    )


def _delta_heads(record: Record) -> DeltaHeads:
    heads = DeltaHeads(
        key_heads=record.whole("linear_num_key_heads", KEY_HEADS, low=1, high=LARGEST),
        value_heads=record.whole("linear_num_value_heads", VALUE_HEADS, low=1, high=LARGEST),
        key_dim=record.whole("linear_key_head_dim", DELTA_DIM, low=1, high=LARGEST),
        value_dim=record.whole("linear_value_head_dim", DELTA_DIM, low=1, high=LARGEST),
    )
    if heads.value_heads % heads.key_heads:
        key_heads = f"linear_num_key_heads {heads.key_heads}"
        raise record.error(f"linear_num_value_heads {heads.value_heads} is no multiple of {key_heads}")
    return heads


def _rotary_dims(record: Record, head_dim: int) -> int:
    """Returns how many numbers of a head are rotated, from `partial_rotary_factor`, their share of `head_dim`.

    The factor is in `rope_parameters` (transformers 5), in `rope_scaling`, or in the config itself.
    """
    source = record  # the first of three records that has the factor
    for nested in (record.record("rope_parameters"), record.record("rope_scaling")):
        if "partial_rotary_factor" in nested:
            source = nested
            break
    share = source.number("partial_rotary_factor", ROTARY_SHARE, low=0, high=1, above=True)
    dims = int(head_dim * share)
    if dims % 2 or dims == 0:
        raise record.error(
            f"partial_rotary_factor {share:g} rotates {dims} of {head_dim} numbers; they must be even and above 0"
        )
    return dims
