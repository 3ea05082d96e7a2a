"""A Qwen2 with LoRA in float64 and plain tensor operations: what hand-written gradients are compared with."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from r3lite.models.causal_lm import CausalLM
from r3lite.models.lora import LoraLinear

Upcast = Callable[[Tensor], Tensor]  # a parameter -> the same in float64


def linear(layer: LoraLinear, adapter: str, x: Tensor, upcast: Upcast) -> Tensor:
    """x [T, in] times the base's weight and the adapter's alpha / r * B A, merged into one matrix."""
    A, B = upcast(layer.lora_A[adapter]), upcast(layer.lora_B[adapter])
    config = layer.switch.configs[adapter]
    out = x @ (upcast(layer.base.weight) + config.alpha / config.r * B @ A).T
    return out if layer.base.bias is None else out + upcast(layer.base.bias)


def norm(layer: nn.Module, x: Tensor, eps: float, upcast: Upcast) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * upcast(layer.weight)


def rotated(x: Tensor, theta: float) -> Tensor:
    """x [H, T, D] rotated by position: dimensions i and i + D/2 by the angle t theta^(-2i/D) (arXiv 2104.09864)."""
    _, T, D = x.shape
    powers = theta ** (-torch.arange(0, D, 2, dtype=x.dtype) / D)
    angles = torch.arange(T, dtype=x.dtype)[:, None] * powers  # [T, D/2]
    one, two = x[..., : D // 2], x[..., D // 2 :]
    return torch.cat((one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()), -1)


def hidden_states(model: CausalLM, adapter: str, tokens: Tensor, upcast: Upcast) -> Tensor:
    """Hidden states [T, C] of one row of tokens [T], after the final norm."""
    c, T = model.config, len(tokens)
    x = upcast(model.model.embed_tokens.weight)[tokens]
    for layer in model.model.layers:
        h, attention = norm(layer.input_layernorm, x, c.rms_norm_eps, upcast), layer.self_attn
        q, k, v = (
            linear(projection, adapter, h, upcast).view(T, -1, c.head_dim).transpose(0, 1)  # [H or K, T, D]
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = rotated(q, c.rope_theta), rotated(k, c.rope_theta)
        k, v = (heads.repeat_interleave(len(q) // len(k), dim=0) for heads in (k, v))  # [H, T, D]
        scores = q @ k.transpose(1, 2) / c.head_dim**0.5
        scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
        x = x + linear(attention.o_proj, adapter, (scores.softmax(-1) @ v).transpose(0, 1).flatten(1), upcast)
        h, mlp = norm(layer.post_attention_layernorm, x, c.rms_norm_eps, upcast), layer.mlp
        gate, up = (linear(projection, adapter, h, upcast) for projection in (mlp.gate_proj, mlp.up_proj))
        x = x + linear(mlp.down_proj, adapter, gate * gate.sigmoid() * up, upcast)
    return norm(model.model.norm, x, c.rms_norm_eps, upcast)
