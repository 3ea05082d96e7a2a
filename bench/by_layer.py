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
from r3lite.memory.duration import CARD, Cost
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


def cost(counts: Counts) -> Cost:
    """In the terms of r3lite/memory/duration.py: a card multiplies while it reads, and all else takes its own time."""
    products = sum(counts.moved[name] for name in PRODUCTS)
    return Cost(
        weights=products,
        products=sum(counts.computed[name] for name in PRODUCTS),
        attention=sum(n for name, n in counts.computed.items() if "attention" in name),
        activations=moved(counts) - products,
        kernels=counts.kernels,
    )


def seconds(found: Split, layers: int, card: Speeds, dtype: str) -> float:
    """Predicted for a model of so many layers; see r3lite/memory/duration.py."""
    return (cost(found.outside) + cost(found.layer) * layers).seconds(card, dtype, CARD)


def on_cards(found: Split, layers: int, dtype: torch.dtype) -> dict[str, float]:
    """Predicted seconds on each card of the table. What was counted in bf16 moves as many bytes in fp16."""
    name = "fp32" if dtype == torch.float32 else "fp16"
    return {card.name: float(f"{seconds(found, layers, card, name):.3g}") for card in CARDS}
