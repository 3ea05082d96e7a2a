"""The decoder of Llama (arXiv 2302.13971), Mistral, Qwen2 (2407.10671) and Qwen3 (2505.09388), in plain PyTorch.

Model families differ in two ways. `ModelConfig` has switches for small differences. For large ones it names other
classes for norms, layers or trunk, which are in files of their own, such as `gemma.py`. `config_file.py` sets both from
a model's config.json. Loading, adapters, sampling and losses are in other files. Modules and parameters are named as in
the published checkpoints.

Shape legend, also of the files that sample and learn:
    B  rows of a batch: its sequences      H  attention heads          C  hidden size
    T  tokens of a row                     K  key/value heads          V  vocabulary
    S  slots of a KV cache that are used   D  size of one head         N  tokens of a flat list, such as all actions
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from r3lite.models.attention import AttentionContext, CausalRows
from r3lite.models.embedding import embedding
from r3lite.models.functions import rms_norm, rotate_, swiglu
from r3lite.models.gated_delta import DeltaHeads
from r3lite.models.projections import project
from r3lite.models.rotary import Rope, RopeScaling, rotary_angles
from r3lite.models.streaming import LayerStream


@dataclass(frozen=True)
class LayerKind:
    """How one layer mixes tokens.

    It mixes them by attention, by a short convolution (LFM2), or by a short convolution followed by the gated delta
    rule (Qwen3.5).
    """

    rope: Rope | None  # rotary positions of the attention; None: queries and keys are not rotated
    # A query attends to at most this many tokens, see attention.masked_keys. None: to itself and all before it.
    window: int | None = None
    taps: int = 0  # length of the convolution in tokens; 0: the layer has attention
    delta: DeltaHeads | None = None  # heads of the delta rule after the convolution; None: there is none


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension: see functions.rms_norm."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a model, and the switches and classes of its family.

    Fields that `config.json` has, too, have the same names as there.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    max_position_embeddings: int = 32_768
    tie_word_embeddings: bool = True
    head_dim: int = 0  # of one head; 0: hidden_size / num_attention_heads
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = True  # whether q_proj, k_proj and v_proj have biases: Qwen2
    qk_norm: bool = False  # whether each query and key head is normalized before the rotation: Qwen3, Gemma 3
    # One kind per layer. Empty: all layers have attention without a window, rotated by rope_theta and rope_scaling.
    layer_kinds: tuple[LayerKind, ...] = ()
    attention_scale: float | None = None  # attention scores are multiplied by it; None: 1 / sqrt(head_dim)
    embedding_multiplier: float = 1.0
    rounds_multiplier: bool = False  # whether embedding_multiplier is rounded to the weights' dtype: Gemma
    logits_scaling: float = 1.0  # logits are divided by it
    norm: type[nn.Module] = RMSNorm
    # From [..., 2 W] to [..., W], with W = intermediate_size: the outputs of gate_proj and up_proj stand side by side.
    activation: Callable[[Tensor], Tensor] = swiglu
    layer: "type[Layer] | None" = None  # class of the layers; None: Layer
    trunk: "type[Trunk] | None" = None  # class of the trunk; None: Trunk
    is_text_part: bool = False  # whether this is the text part of a model that also sees images, see text_part.py

    def __post_init__(self):
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)

    def kind(self, layer_idx: int) -> LayerKind:
        """Returns the kind of a layer."""
        if self.layer_kinds:
            return self.layer_kinds[layer_idx]
        return LayerKind(Rope(self.rope_theta, self.rope_scaling))


class Attention(nn.Module):
    """Grouped-query self-attention of one layer. The forward pass's context decides which keys a query attends to."""

    def __init__(self, config: ModelConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.window = config.kind(layer_idx).window
        self.scale = config.attention_scale
        q_size = self.heads * self.head_dim
        kv_size = self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)
        self.q_norm = None
        self.k_norm = None
        if config.qk_norm:
            self.q_norm = config.norm(self.head_dim, config.rms_norm_eps)
            self.k_norm = config.norm(self.head_dim, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        context: AttentionContext,
        residual: Tensor | None,
    ) -> Tensor:
        """Returns the attention's output for x [B, T, C], plus the residual [B, T, C] if there is one.

        `cos` and `sin` are those of `rotary_angles`; None: queries and keys are not rotated.
        """
        qkv = project((self.q_proj, self.k_proj, self.v_proj), x)  # the three outputs side by side
        qkv = qkv.unflatten(-1, (-1, self.head_dim))  # [B, T, H+2K, D]
        if self.q_norm:
            q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
            qkv = torch.cat((self.q_norm(q), self.k_norm(k), v), dim=2)
        if cos is not None:
            # `rotate_` overwrites `qkv`, to save memory: only its result may be used after it.
            qkv = rotate_(qkv, heads=self.heads + self.kv_heads, cos=cos, sin=sin)
        qkv = qkv.transpose(1, 2)  # [B, H+2K, T, D]
        q, kv = qkv.split((self.heads, 2 * self.kv_heads), dim=1)  # [B, H, T, D] and [B, 2K, T, D]
        out = context.attend(self.layer_idx, q, kv, window=self.window, scale=self.scale)  # [B, T, H D]
        return project((self.o_proj,), out, residual)


class MLP(nn.Module):
    """The feed-forward network: SwiGLU, or another gated activation, between two projections."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.activation = config.activation
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, residual: Tensor | None, tile: int | None = None) -> Tensor:
        """Returns the network's output for x [..., C], plus the residual [..., C] if there is one.

        Without gradients, a `tile` bounds the memory of the wide intermediate tensors: `tile` tokens are computed at a
        time, and x must be [B, T, C]. None, or with gradients: all tokens are computed at once.
        """
        if not tile or torch.is_grad_enabled() or x.shape[0] * x.shape[1] <= tile:
            return self._project(x, residual)
        outputs = []
        x_tiles = x.flatten(0, 1).split(tile)  # tiles of [B T, C]
        residual_tiles = [None] * len(x_tiles)
        if residual is not None:
            residual_tiles = residual.flatten(0, 1).split(tile)
        for x_tile, residual_tile in zip(x_tiles, residual_tiles, strict=True):
            outputs.append(self._project(x_tile, residual_tile))
        return torch.cat(outputs).view_as(x)

    def _project(self, x: Tensor, residual: Tensor | None) -> Tensor:
        hidden = self.activation(project((self.gate_proj, self.up_proj), x))
        return project((self.down_proj,), hidden, residual)


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: ModelConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.rope = config.kind(layer_idx).rope
        self.input_layernorm = config.norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer_idx)
        self.post_attention_layernorm = config.norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        context: AttentionContext,
        tile: int | None = None,
    ) -> Tensor:
        """Returns the layer's output [B, T, C] for x [B, T, C].

        `tile` is explained at MLP. Only models.activation_checkpointing passes one. It has an effect in passes without
        gradients, and in the first run of a recomputed layer.
        """
        return self.second_half(self.first_half(x, cos, sin, context=context), tile)

    def first_half(self, x: Tensor, cos: Tensor | None, sin: Tensor | None, context: AttentionContext) -> Tensor:
        """Returns x [B, T, C] plus the output of the attention for the normalized x."""
        return self.self_attn(self.input_layernorm(x), cos, sin, context=context, residual=x)

    def second_half(self, x: Tensor, tile: int | None = None) -> Tensor:
        """Returns x [..., C] plus the output of the feed-forward network for the normalized x."""
        return self.mlp(self.post_attention_layernorm(x), residual=x, tile=tile)


class Trunk(nn.Module):
    """Embedding, layers and final norm: everything but the head."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed_tokens = embedding(config.vocab_size, config.hidden_size)
        layer_class = config.layer or Layer
        self.layers = nn.ModuleList(layer_class(config, i) for i in range(config.num_hidden_layers))
        self.norm = config.norm(config.hidden_size, config.rms_norm_eps)


def run_layer(
    layer: Layer,
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    context: AttentionContext,
) -> Tensor:
    """Returns a layer's output [B, T, C], without activation checkpointing: autograd keeps its activations."""
    return layer(x, cos, sin, context=context)


class CausalLM(nn.Module):
    """The causal language model. Calling it returns hidden states; `logits` applies the head to them.

    The two are separate because the logits of one token are 151,936 numbers in Qwen2, and callers need those of a few
    tokens at a time.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = (config.trunk or Trunk)(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.ropes = dict.fromkeys(layer.rope for layer in self.model.layers)  # the different ropes, as a set in order
        self.run_layer = run_layer  # a function; activation_checkpointing and full_tuning replace it
        self.layer_stream: LayerStream | None = None  # copies layers to the device one by one; see models.streaming

    @property
    def head_weight(self) -> Tensor:
        """The weight [V, C] of the output head; if the config ties it to the embedding, the embedding's weight."""
        if self.config.tie_word_embeddings:
            return self.model.embed_tokens.weight
        return self.lm_head.weight

    def forward(self, input_ids: Tensor, context: AttentionContext | None = None) -> Tensor:
        """Returns the hidden states [B, T, C] after the final norm, for token ids [B, T], which may be on the host.

        What `input_ids` must hold depends on the context:
        - No context: independent rows, padded on the right.
        - A pack, a prefill or a verification of drafts: the tokens of all rows, laid end to end: [1, N].
        - A decode step: the last token of each row, which is not cached yet: [B, 1].
        - A verification of drafts in a CUDA graph: the last token of each row and its draft: [B, T].

        The hidden states are already divided by the config's `logits_scaling`, so `logits` does not divide.
        """
        x = self._embed(input_ids)
        if context is None:
            context = CausalRows(input_ids)
        angles = {}
        for rope in self.ropes:
            # The pair (cos, sin); (None, None) if the rope is None.
            angles[rope] = rotary_angles(context.positions, rope, head_dim=self.config.head_dim, dtype=x.dtype)
        for layer in self.model.layers:
            cos, sin = angles[layer.rope]
            x = self.run_layer(layer, x, cos=cos, sin=sin, context=context)
        x = self.model.norm(x)
        if self.config.logits_scaling != 1:
            # Divided here and not in `logits`, because some callers apply the head without `logits`.
            x = x.div_(self.config.logits_scaling)
        return x

    def _embed(self, input_ids: Tensor) -> Tensor:
        """Returns the input of the first layer [B, T, C]."""
        embed_tokens = self.model.embed_tokens
        x = embed_tokens(input_ids.to(embed_tokens.weight.device, non_blocking=True))  # [B, T, C]
        if self.layer_stream is not None:
            x = self.layer_stream.upload(x)  # `embed_tokens` may be on the host
        multiplier = self.config.embedding_multiplier
        if self.config.rounds_multiplier:
            multiplier = torch.tensor(multiplier, dtype=x.dtype).item()  # rounded to the dtype
        return x if multiplier == 1 else x * multiplier

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [..., V] of hidden states [..., C], in the weights' dtype."""
        return F.linear(hidden, self.head_weight)
