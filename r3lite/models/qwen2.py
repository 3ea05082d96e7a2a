"""Qwen2 as published by the Qwen team (arXiv 2407.10671), in plain PyTorch.

Owns the network and its sizes; knows nothing of files, adapters, sampling or losses. Module and parameter names
are those of the published checkpoints, so a state dict is a checkpoint.

Shape legend, used in every file of r3lite:
    B  rows (sequences) of a batch         H  attention heads          C  hidden size
    T  tokens of a row                     K  key/value heads          V  vocabulary
    S  slots of a KV cache that are used   D  size of one head         N  rows of a flat list of tokens
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from r3lite.models.functions import rms_norm, swiglu
from r3lite.models.kv_cache import LayerCache, Piece, Reading, Step
from r3lite.models.packing import Pack, Segment

Seen = LayerCache | list[Piece] | list[Segment] | None
"""What tokens attend to besides themselves: what a cache holds, what comes before them in a pack, or in their row."""


@dataclass(frozen=True)
class Qwen2Config:
    """Sizes of one model, under the names that `config.json` uses."""

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

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class RMSNorm(nn.Module):
    """See functions.rms_norm."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rotary_angles(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What `rotate` takes for positions [B, T]: cosines and sines [B, 1, T, D] (arXiv 2104.09864), made in fp32.

    The sines of the first half are negated here, once, rather than half of every head in every layer.
    """
    powers = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[:, None, :, None].float() / theta**powers  # [B, 1, T, D/2]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the heads x [B, H, T, D] by their positions' angles [B, 1, T, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention with grouped queries: each key/value head serves H / K query heads."""

    def __init__(self, config: Qwen2Config):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Seen) -> Tensor:
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, self.heads, self.head_dim).transpose(1, 2)  # [B, H, T, D]
        k = self.k_proj(x).view(B, T, self.kv_heads, self.head_dim).transpose(1, 2)  # [B, K, T, D]
        v = self.v_proj(x).view(B, T, self.kv_heads, self.head_dim).transpose(1, 2)  # [B, K, T, D]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if isinstance(seen, LayerCache):
            # The queries that share a key head are laid end to end, so that the cache is never copied.
            k, v = seen.append(k, v)  # [B, K, S, D]
            q = q.reshape(B, self.kv_heads, -1, self.head_dim)  # [B, K, G, D]; T is 1
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen.mask).reshape(B, 1, -1)  # [B, 1, H D]
        elif seen is None:
            out = self._attend(q, k, v, None)
        else:
            parts = [self._attend(q[:, :, part.own], *part.gather(k, v), part.mask) for part in seen]
            out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)  # [1, N, H D]
        return self.o_proj(out)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attention's output [B, T, H D] for queries [B, H, T, D], keys and values [B, K, S, D]; causal without a mask.

        Heads are expanded rather than enable_gqa: on CUDA that flag is served only by the flash and math kernels, so
        cards without FlashAttention-2 would fall silently to the O(T^2) math kernel.
        """
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)  # [B, H, S, D]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)  # [B, H, T, D]
        return out.transpose(1, 2).flatten(2)


class MLP(nn.Module):
    """SwiGLU between two projections. Without gradients, at most `tile` tokens at a time: its inside is wide."""

    def __init__(self, config: Qwen2Config):
        super().__init__()
        self.tile: int | None = None
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.tile and not torch.is_grad_enabled() and x.shape[0] * x.shape[1] > self.tile:
            pieces = x.flatten(0, 1).split(self.tile)  # of [B T, C]
            return torch.cat([self._project(piece) for piece in pieces]).view_as(x)
        return self._project(x)

    def _project(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: Qwen2Config):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Seen) -> Tensor:
        return self.feed_forward(self.attend(x, cos, sin, seen))

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Seen) -> Tensor:
        """The layer's first half: x [B, T, C] plus what it attends to."""
        return x + self.self_attn(self.input_layernorm(x), cos, sin, seen)

    def feed_forward(self, x: Tensor) -> Tensor:
        """The second half: each token of x [..., C] by itself."""
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and final norm: everything but the head."""

    def __init__(self, config: Qwen2Config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Qwen2(nn.Module):
    """The causal language model. Calling it gives hidden states; `logits` applies the head where it is wanted.

    A logit row is 151,936 numbers wide, so nothing here makes more of them than the caller asks for.
    """

    def __init__(self, config: Qwen2Config):
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        # Replaced by models.activation_checkpointing: how layer i is run.
        self.run_layer = lambda i, layer, *inputs: layer(*inputs)

    @property
    def head_weight(self) -> Tensor:
        """The output head [V, C]; the embedding itself when the two are tied."""
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def forward(self, input_ids: Tensor, among: Pack | Reading | Step | None = None) -> Tensor:
        """Hidden states [B, T, C] after the final norm, for token ids [B, T].

        Rows are padded on the right. Attention is causal, so padding changes no token before it and needs no mask.
        `among` says where the ids stand where they are not rows by themselves: in a pack [1, N], or in rows of a cache
        that are given more [1, N] or go on by one token each [B, 1].
        """
        x = self.model.embed_tokens(input_ids)  # [B, T, C]
        positions = among.positions if among else torch.arange(input_ids.shape[1], device=x.device)[None]
        cos, sin = rotary_angles(positions, self.config.head_dim, self.config.rope_theta, x.dtype)
        for i, layer in enumerate(self.model.layers):
            x = self.run_layer(i, layer, x, cos, sin, among.seen(i) if among else None)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., C], in the weights' dtype."""
        return F.linear(hidden, self.head_weight)
