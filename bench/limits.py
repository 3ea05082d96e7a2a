"""The speed limit that contestants are compared with: a training step's useful operations, at a device's peak speed."""

import time
from collections.abc import Callable

import torch

from r3lite.devices.precision import Precision
from r3lite.models.causal_lm import CausalLM
from r3lite.models.linear import linear
from r3lite.models.lora import LoraLinear

# Rows and columns of the matrices: so many that products reach the peak of the device.
CUDA_SIZE = 8192
CPU_SIZE = 2048


def products(operations: int, precision: Precision) -> Callable[[], float]:
    """Returns a function that does `operations` floating-point operations, as products of large square matrices.

    The function returns the seconds that the operations take.
    """
    device = precision.device
    size = CUDA_SIZE if device.type == "cuda" else CPU_SIZE
    a = torch.randn(size, size, device=device, dtype=precision.dtype)
    b = torch.randn(size, size, device=device, dtype=precision.dtype)
    product_operations = 2 * size**3
    count = -(-operations // product_operations)  # rounded up

    @torch.no_grad()
    def work() -> float:
        start = time.perf_counter()
        for _ in range(count):
            linear(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize()
        # The number of products is rounded up, so they do more operations: only the share that was asked for counts.
        return (time.perf_counter() - start) * operations / (count * product_operations)

    return work


def training_flops(base: int, head: int, adapters: int, layers: int, width: int, tokens: int) -> int:
    """Returns the useful floating-point operations of a training step on a row of T tokens (`tokens`).

    `base`, `head` and `adapters` are numbers of weights. A product takes 2 operations per weight and token. A frozen
    weight is in two products: forward, and for the gradient of the input. A trained weight is in a third, for its own
    gradient. Attention over `width` numbers per token takes two products of T x T pairs forward and four backward; half
    of the pairs are left out, because a token does not attend to later ones. Recomputation and elementwise work do not
    count.
    """
    return tokens * (4 * (base + head) + 6 * adapters) + 6 * layers * width * tokens**2


def sft_flops(model: CausalLM, vocabulary: int, tokens: int) -> int:
    """Returns `training_flops` for a model with an adapter and a head of `vocabulary` rows."""
    config = model.config
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    adapted = [module for module in model.modules() if isinstance(module, LoraLinear)]
    trained = [weight for module in adapted for weight in module.parameters() if weight.requires_grad]
    return training_flops(
        base=sum(linear_layer.weight.numel() for linear_layer in linears),
        head=vocabulary * config.hidden_size,
        adapters=sum(weight.numel() for weight in trained),
        layers=config.num_hidden_layers,
        width=config.num_attention_heads * config.head_dim,
        tokens=tokens,
    )
