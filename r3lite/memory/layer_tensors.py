"""The tensors of a model's layers, read off a layer of each kind that is made without memory."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

import torch
from torch import nn

from r3lite.models.causal_lm import Layer, ModelConfig
from r3lite.models.gated_delta import DeltaHeads
from r3lite.models.projections import of_model
from r3lite.models.stacks import stacks


def layer_taps(m: ModelConfig) -> list[int]:
    """Returns the taps of the convolution of each layer; 0 if it attends.

    Two layers of a model with the same taps have tensors of the same shapes. Windows and rotations may differ.
    """
    if not m.layer_kinds:
        return [0] * m.num_hidden_layers
    return [kind.taps for kind in m.layer_kinds]


@cache
def layers_by_taps(m: ModelConfig) -> Mapping[int, int]:
    """Returns how many layers have a convolution of so many taps; 0: how many attend."""
    return MappingProxyType(Counter(layer_taps(m)))


@cache
def delta_heads(m: ModelConfig) -> DeltaHeads | None:
    """Returns the heads of the gated delta rule that follows the convolutions; None if the model has no such rule."""
    return next((kind.delta for kind in m.layer_kinds if kind.delta), None)


@dataclass(frozen=True)
class LayerTensors:
    """The tensors of a layer of one kind."""

    linears: dict[str, tuple[int, int]]  # (out, in) of the projections: seven, or fewer if some are one matrix
    stacks: list[list[str]]  # names of the projections that lie one after another in memory, see models/stacks.py
    biases: tuple[int, ...]  # the size of each projection's bias
    norms: int  # how many norms over a hidden state the layer has
    others: tuple[int, ...]  # the size of each other tensor: convolutions, norms of heads, decays of a delta rule
    sizes: tuple[int, ...]  # the size of each tensor, all of the above


@cache
def layer_tensors(m: ModelConfig, taps: int) -> LayerTensors:
    """Returns the tensors of the layers whose convolution has so many taps."""
    with torch.device("meta"):
        layer = (m.layer or Layer)(m, layer_taps(m).index(taps))
    norms = [child for child in layer.children() if isinstance(child, m.norm)]
    linears = {}
    biases = []
    counted = {norm.weight for norm in norms}
    for path, module in layer.named_modules():
        if isinstance(module, nn.Linear):
            linears[path.rpartition(".")[2]] = (module.out_features, module.in_features)
            counted.add(module.weight)
            if module.bias is not None:
                biases.append(module.out_features)
                counted.add(module.bias)
    return LayerTensors(
        linears=linears,
        stacks=stacks(linears),
        biases=tuple(biases),
        norms=len(norms),
        others=tuple(tensor.numel() for tensor in layer.parameters() if tensor not in counted),
        sizes=tuple(tensor.numel() for tensor in layer.parameters()),
    )


def projection_names(m: ModelConfig) -> set[str]:
    """Returns the names of the projections of all layers."""
    return {name for taps in layers_by_taps(m) for name in layer_tensors(m, taps).linears}


def tensor_sizes(m: ModelConfig) -> tuple[list[int], list[int]]:
    """Returns how many numbers each tensor has: first the tensors of all layers, then the others."""
    layers: list[int] = []
    for taps, count in layers_by_taps(m).items():
        layers += layer_tensors(m, taps).sizes * count
    tables = [m.vocab_size * m.hidden_size] * (1 if m.tie_word_embeddings else 2)
    return layers, [m.hidden_size, *tables]


@cache
def adapted(m: ModelConfig, targets: tuple[str, ...], taps: int) -> tuple[str, ...]:
    """Returns those projections of a layer that an adapter with these targets adapts."""
    return of_model(targets, layer_tensors(m, taps).linears)
