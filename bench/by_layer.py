"""Splits the counted work of a card into a layer's share and the share outside the layers, and predicts its time.

The work is counted for a model of one layer and for a model of two. A layer's share is the difference of the two
counts; the count of the first model less a layer's share is the share outside. So a model of n layers has the count
outside + n x layer. This is right in training, too, where the first layer is cheaper than the others, because its input
needs no gradient: both models save that, so the share outside is smaller by it.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench.counted import Done, Work
from bench.shapes import write_folder
from bench.stress.simulated_cuda import GIB, SimulatedCuda
from bench.stress.simulation.counts import Counts
from r3lite.devices.cards import CARDS, Speeds
from r3lite.devices.precision import Precision
from r3lite.models.causal_lm import ModelConfig

MEMORY = 64 * GIB  # of the simulated card; more than any work needs, because only work is counted
PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm")  # operators that multiply matrices


@dataclass(frozen=True)
class Split:
    """The counts of one piece of work."""

    layer: Counts  # of each layer
    outside: Counts  # of all else: embedding, last norm, head, loss, optimizer, sampling


def split(
    work: Callable[[SimulatedCuda, str, Precision], Done], shape: ModelConfig, vocabulary: int, dtype: torch.dtype
) -> dict[Work, Split]:
    """Returns the split counts of each piece of `work`, for a shape of model and a tokenizer of `vocabulary` tokens."""
    one_layer = _count(work, replace(shape, num_hidden_layers=1), vocabulary=vocabulary, dtype=dtype)
    two_layers = _count(work, replace(shape, num_hidden_layers=2), vocabulary=vocabulary, dtype=dtype)
    splits = {}
    for piece, counts in one_layer.items():
        layer = two_layers[piece] - counts
        splits[piece] = Split(layer=layer, outside=counts - layer)
    return splits


def _count(work: Callable[..., Done], shape: ModelConfig, vocabulary: int, dtype: torch.dtype) -> Done:
    """Does the work with a new model on the simulated card, and returns its counts."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_folder(Path(temporary) / "model", shape, vocabulary)
        with SimulatedCuda(MEMORY, MEMORY, bf16=True) as card:
            return work(card, folder, Precision(dtype, torch.device("cuda")))


def bytes_moved(counts: Counts) -> int:
    """Returns the number of bytes that kernels read and write."""
    return counts.read + counts.written


@dataclass(frozen=True)
class Cost:
    """The counts of a piece of work from which its time is predicted, for a whole model."""

    product_bytes: float  # moved by matrix products
    product_operations: float
    attention_operations: float
    other_bytes: float  # moved by all other kernels
    kernels: float

    def seconds(self, card: Speeds, dtype: str) -> float:
        """Returns the predicted seconds at a card's peak bandwidth and peak speed.

        Matrix products read while they multiply, so together they take the longer of both times. Other times add up.
        """
        bandwidth = card.bandwidth[dtype]
        flops = card.flops[dtype]
        products = max(self.product_bytes / bandwidth, self.product_operations / flops)
        return products + self.other_bytes / bandwidth + self.attention_operations / flops + self.kernels * card.launch


def cost(split: Split, layers: int) -> Cost:
    """Returns the cost of a piece of work for a model of `layers` layers."""

    def total(figure: Callable[[Counts], float]) -> float:
        return figure(split.outside) + layers * figure(split.layer)

    product_bytes = total(lambda counts: sum(counts.moved[name] for name in PRODUCTS))
    return Cost(
        product_bytes=product_bytes,
        product_operations=total(lambda counts: sum(counts.computed[name] for name in PRODUCTS)),
        attention_operations=total(lambda counts: sum(n for name, n in counts.computed.items() if "attention" in name)),
        other_bytes=total(bytes_moved) - product_bytes,
        kernels=total(lambda counts: counts.kernels),
    )


def on_cards(split: Split, layers: int, dtype: torch.dtype) -> dict[str, float]:
    """Returns the predicted seconds on each card of r3lite/devices/cards.py, by its name.

    Work in bf16 is predicted as fp16, which moves as many bytes: cards without bf16 run fp16.
    """
    name = "fp32" if dtype == torch.float32 else "fp16"
    return {card.name: float(f"{cost(split, layers).seconds(card, name):.3g}") for card in CARDS}
