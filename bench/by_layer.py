"""What a card does in each layer and outside the layers, and how long cards of the table would take for it.

A layer's share is what a model of two layers costs more than one of one; what is left of that one is outside. The
first layer makes no gradient of its input: what it saves in training is subtracted from what is outside, so that
outside + n x layer is right for a model of n layers.
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

ROOM = 64 * GIB  # of the simulated card: nothing here is about what fits
PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm")  # operators that multiply matrices


@dataclass(frozen=True)
class Split:
    """What a card does for one piece of work."""

    layer: Counts
    outside: Counts


def split(
    work: Callable[[SimulatedCuda, str, Precision], Done], shape: ModelConfig, tokens: int, dtype: torch.dtype
) -> dict[Work, Split]:
    """What each piece of work costs a model of this shape, whose tokenizer has so many tokens."""
    one, two = (_done(work, replace(shape, num_hidden_layers=layers), tokens, dtype) for layers in (1, 2))
    layers = {piece: two[piece] - counts for piece, counts in one.items()}
    return {piece: Split(layers[piece], counts - layers[piece]) for piece, counts in one.items()}


def _done(work: Callable[..., Done], shape: ModelConfig, tokens: int, dtype: torch.dtype) -> Done:
    with tempfile.TemporaryDirectory() as where:
        folder = write_folder(Path(where) / "model", shape, tokens)
        with SimulatedCuda(ROOM, ROOM, bf16=True) as card:
            return work(card, folder, Precision(dtype, torch.device("cuda")))


def moved(counts: Counts) -> int:
    """Bytes read and written by kernels."""
    return counts.read + counts.written


@dataclass(frozen=True)
class Cost:
    """What is counted of some work on a model of so many layers."""

    of_products: float  # bytes that matrix products move
    products: float  # their operations
    attention: float  # operations of attention
    moved: float  # bytes that all other kernels move
    kernels: float

    def seconds(self, card: Speeds, dtype: str) -> float:
        """Returns the time at a card's peaks: it multiplies while it reads, and all else takes its own time."""
        bandwidth, flops = card.bandwidth[dtype], card.flops[dtype]
        products = max(self.of_products / bandwidth, self.products / flops)
        return products + self.moved / bandwidth + self.attention / flops + self.kernels * card.launch


def cost(split: Split, layers: int) -> Cost:
    def total(figure: Callable[[Counts], float]) -> float:
        return figure(split.outside) + layers * figure(split.layer)

    of_products = total(lambda counts: sum(counts.moved[name] for name in PRODUCTS))
    return Cost(
        of_products=of_products,
        products=total(lambda counts: sum(counts.computed[name] for name in PRODUCTS)),
        attention=total(lambda counts: sum(n for name, n in counts.computed.items() if "attention" in name)),
        moved=total(moved) - of_products,
        kernels=total(lambda counts: counts.kernels),
    )


def on_cards(found: Split, layers: int, dtype: torch.dtype) -> dict[str, float]:
    """Predicted seconds on each card of the table. What was counted in bf16 moves as many bytes in fp16."""
    name = "fp32" if dtype == torch.float32 else "fp16"
    return {card.name: float(f"{cost(found, layers).seconds(card, name):.3g}") for card in CARDS}
