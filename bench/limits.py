"""What a device can do at the most, and how much of it a training step must do: what contestants are held against."""

import time
from collections.abc import Callable

import torch

from r3lite.devices.precision import Precision
from r3lite.models.causal_lm import CausalLM
from r3lite.models.linear import linear
from r3lite.models.lora import LoraLinear


def products(operations: int, precision: Precision) -> Callable[[], float]:
    """What does so many floating-point operations in large square products, and returns its seconds."""
    device = precision.device
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device, dtype=precision.dtype) for _ in range(2))
    count = -(-operations // (2 * size**3))

    @torch.no_grad()
    def work() -> float:
        start = time.perf_counter()
        for _ in range(count):
            linear(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * operations / (count * 2 * size**3)  # the last product is in part beyond

    return work


def training_flops(base: int, head: int, adapters: int, layers: int, width: int, tokens: int) -> int:
    """Floating-point operations of one training step on a row of T = `tokens` that are of use to the model.

    `base`, `head` and `adapters` are numbers of weights. A product takes 2 operations a weight and token. Frozen ones
    are in two: forward, and the gradient with respect to the input; trained ones in a third, the gradient with respect
    to the weight. Attention over `width` numbers a token is two products of T x T pairs forward and four backward,
    half of which causality leaves out. Recomputation and elementwise work do not count.
    """
    return tokens * (4 * (base + head) + 6 * adapters) + 6 * layers * width * tokens**2


def sft_flops(model: CausalLM, vocabulary: int, tokens: int) -> int:
    """`training_flops` of a model with an adapter and a head of `vocabulary` rows."""
    config = model.config
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    adapters = [p for m in model.modules() if isinstance(m, LoraLinear) for p in m.parameters() if p.requires_grad]
    return training_flops(
        base=sum(layer.weight.numel() for layer in layers),
        head=vocabulary * config.hidden_size,
        adapters=sum(p.numel() for p in adapters),
        layers=config.num_hidden_layers,
        width=config.num_attention_heads * config.head_dim,
        tokens=tokens,
    )
