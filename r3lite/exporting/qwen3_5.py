"""How the layers with the gated delta rule differ between a GGUF file of Qwen3.5 and the checkpoint.

There are K key heads, each of which serves r value heads. In a checkpoint the r value heads of a key head are
neighbours; in a file the first value heads of all key heads come first, then the second ones, and so on. So value head
g r + j of a checkpoint, head j (0 to r - 1) of key head g (0 to K - 1), is value head j K + g of a file. Where a
checkpoint has A_log, a file has the rate of the decay, -exp(A_log).
"""

import re

import torch
from torch import Tensor

from r3lite.models.causal_lm import LayerKind, ModelConfig

# Numbers of rotary pairs that turn by the time, by the height and by the width of a part of an image; the fourth
# section is empty. In a text all pairs turn by the position.
ROTARY_SECTIONS = [11, 11, 10, 0]
# The tensors of a layer that are ordered by value heads.
AFTER_KEYS = ("in_proj_qkv", "conv1d")  # the rows of the value heads follow those of the queries and keys
ONE_NUMBER = ("in_proj_a", "in_proj_b", "A_log", "dt_bias")  # one row, or one number, for each value head
COLUMNS = "out_proj"  # the value heads are its inputs, so its columns are ordered by them
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
    """Returns the kind of the layers with the delta rule; they are all alike."""
    return next(kind for kind in config.layer_kinds if kind.delta)


def sizes(config: ModelConfig) -> dict[str, int]:
    """Returns the sizes that only this family has, by their keys in a file, without the architecture."""
    kind = _delta_kind(config)
    heads = kind.delta
    return {
        "ssm.conv_kernel": kind.taps,
        "ssm.state_size": heads.key_dim,
        "ssm.group_count": heads.key_heads,
        "ssm.time_step_rank": heads.value_heads,
        "ssm.inner_size": heads.value_heads * heads.value_dim,
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
    """Returns a tensor of a file as the checkpoint has it: the inverse of `to_file`, for A_log up to rounding."""
    axis, order = _file_order(name, config)
    if order is not None:
        tensor = tensor.index_select(axis, order.argsort())
    if name.endswith(DECAY):
        tensor = (-tensor).log()
    return tensor


def _file_order(name: str, config: ModelConfig) -> tuple[int, Tensor | None]:
    """Returns the axis along which a tensor is ordered by value heads, and its order in a file: indices of the
    checkpoint [n]. The order is None if it is the same in both.
    """
    match = re.search(r"\.linear_attn\.(\w+)", name)
    part = ""
    if match:
        part = match[1]
    axis = 0
    matrix_without_heads = "lora_A"  # along the axis, this matrix of an adapter has the rank instead of the heads
    if part == COLUMNS:
        axis = 1
        matrix_without_heads = "lora_B"
    if part not in PARTS or matrix_without_heads in name:
        return axis, None
    heads = _delta_kind(config).delta
    by_key_head = torch.arange(heads.value_heads).view(heads.key_heads, -1)
    head_order = by_key_head.t().flatten()
    if part in ONE_NUMBER:
        return axis, head_order
    indices_by_head = torch.arange(heads.value_heads * heads.value_dim).view(heads.value_heads, -1)
    order = indices_by_head[head_order].flatten()
    if part in AFTER_KEYS:
        queries, keys, _ = heads.sizes
        first_value = queries + keys
        order = torch.cat((torch.arange(first_value), first_value + order))
    return axis, order
