"""How the layers with the gated delta rule differ between a GGUF file of Qwen3.5 and the checkpoint.

In a checkpoint the value heads that one key head serves stand together. llama.cpp deals them out to the key heads in
turn: if each of K key heads serves r value heads, the value head j K + g of a file is g r + j of the checkpoint. Where
a checkpoint has A_log, a file has the rate of the decay, -exp(A_log).
"""

import re

import torch
from torch import Tensor

from r3lite.models.causal_lm import LayerKind, ModelConfig

# Numbers of rotary pairs that turn by the time, the height and the width of a part of an image; the fourth section is
# empty. In a text all pairs turn by the position.
ROTARY_SECTIONS = [11, 11, 10, 0]
# Parts of a layer in which value heads stand side by side.
AFTER_KEYS = ("in_proj_qkv", "conv1d")  # behind the queries and keys
ONE_NUMBER = ("in_proj_a", "in_proj_b", "A_log", "dt_bias")  # one row or number per head
COLUMNS = "out_proj"  # the only part that has the heads as inputs
PARTS = (*AFTER_KEYS, *ONE_NUMBER, "in_proj_z", COLUMNS)
DECAY = "A_log"


def attention_interval(config: ModelConfig) -> int | None:
    """Returns n if every n-th layer and no other layer has attention; None if the layers do not alternate like this.

    A GGUF file tells llama.cpp only n, not the kind of each layer.
    """
    has_attention = [kind.delta is None for kind in config.layer_kinds]
    if all(has_attention) or not any(has_attention):
        return None
    interval = has_attention.index(True) + 1
    for layer, attends in enumerate(has_attention):
        if attends != ((layer + 1) % interval == 0):
            return None
    return interval


def is_writable(config: ModelConfig) -> bool:
    """Returns whether the heads and the layers are such as llama.cpp assumes."""
    if attention_interval(config) is None:
        return False
    heads = _delta_kind(config).delta
    return heads.key_dim == heads.value_dim


def _delta_kind(config: ModelConfig) -> LayerKind:
    """Returns the kind of the layers with the delta rule, which are alike."""
    return next(kind for kind in config.layer_kinds if kind.delta)


def sizes(config: ModelConfig) -> dict[str, int]:
    """Returns the sizes that only this family has, by their keys in a file, without the architecture."""
    kind = _delta_kind(config)
    heads = kind.delta
    return {
        "ssm.conv_kernel": kind.taps,
        "ssm.state_size": heads.key_dim,
        "ssm.group_count": heads.keys,
        "ssm.time_step_rank": heads.values,
        "ssm.inner_size": heads.values * heads.value_dim,
        "full_attention_interval": attention_interval(config),
    }


def to_file(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    """Returns a tensor of a checkpoint or of an adapter, under its published name, as a file has it."""
    if name.endswith(DECAY):
        tensor = -tensor.exp()
    axis, order = _file_order(name, config)
    if order is None:
        return tensor
    return tensor.index_select(axis, order)


def from_file(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    """Returns what `to_file` was called with; A_log up to rounding."""
    axis, order = _file_order(name, config)
    if order is not None:
        tensor = tensor.index_select(axis, order.argsort())
    if name.endswith(DECAY):
        tensor = (-tensor).log()
    return tensor


def _file_order(name: str, config: ModelConfig) -> tuple[int, Tensor | None]:
    """Returns an axis of a published tensor and, for each place along it in a file, the place in the checkpoint [n].

    None instead of the places means that both have the same order.
    """
    match = re.search(r"\.linear_attn\.(\w+)", name)
    part = match[1] if match else ""
    axis = 1 if part == COLUMNS else 0
    inner_side = "lora_B" if axis == 1 else "lora_A"  # the adapter's matrix with the rank along the axis
    if part not in PARTS or inner_side in name:
        return axis, None
    heads = _delta_kind(config).delta
    by_key_head = torch.arange(heads.values).view(heads.keys, -1)
    head_order = by_key_head.t().flatten()
    if part in ONE_NUMBER:
        return axis, head_order
    numbers = torch.arange(heads.values * heads.value_dim).view(heads.values, -1)
    order = numbers[head_order].flatten()
    if part in AFTER_KEYS:
        queries, keys, _ = heads.sizes
        before = queries + keys
        order = torch.cat((torch.arange(before), before + order))
    return axis, order
