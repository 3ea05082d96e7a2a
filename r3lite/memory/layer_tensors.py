"""The tensors of a model's layers. They are listed from one layer of each kind, made without memory (on `meta`)."""

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
    """Returns, for each layer, the taps of its convolution; 0 if it has attention.

    In the planner the taps stand for the kind of a layer: two layers of a model with the same taps have tensors of the
    same shapes. (Their windows and rotations may differ.)
    """
    if not m.layer_kinds:
        return [0] * m.num_hidden_layers
    return [kind.taps for kind in m.layer_kinds]


@cache
def layers_by_taps(m: ModelConfig) -> Mapping[int, int]:
    """Returns how many layers there are by their taps; under 0 those with attention."""
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
    biases: tuple[int, ...]  # the size of each bias of a projection
    norms: int  # how many norms over a hidden state the layer has
    others: tuple[int, ...]  # the size of each other tensor: convolutions, norms of heads, decays of a delta rule
    sizes: tuple[int, ...]  # the sizes of all tensors: projections, biases, norms and others


@cache
def layer_tensors(m: ModelConfig, taps: int) -> LayerTensors:
    """Returns the tensors of the layers whose convolution has `taps` taps; 0: of those with attention."""
    layer_class = m.layer or Layer
    with torch.device("meta"):
        layer = layer_class(m, layer_taps(m).index(taps))  # the first layer of this kind
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
    """Returns two lists with the size of each tensor: those of all layers, and those of the other tensors."""
    layers: list[int] = []
    for taps, count in layers_by_taps(m).items():
        layers += layer_tensors(m, taps).sizes * count
    table = m.vocab_size * m.hidden_size
    outside_layers = [m.hidden_size, table]  # the final norm, and the embedding
    if not m.tie_word_embeddings:
        outside_layers.append(table)  # the head
    return layers, outside_layers


@cache
def adapted(m: ModelConfig, targets: tuple[str, ...], taps: int) -> tuple[str, ...]:
    """Returns the names of those projections of a layer that an adapter with these targets adapts."""
    return of_model(targets, layer_tensors(m, taps).linears)
