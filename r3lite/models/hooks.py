"""Forward hooks on a model: a watch on the size of activations."""

import contextlib
import functools
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from r3lite.models.causal_lm import CausalLM

FP16_MAX = torch.finfo(torch.float16).max


class ActivationWatch(contextlib.ExitStack):
    """Watches the layers' outputs within a `with` block, to explain an overflow by the name of the layer.

    `largest` has the greatest magnitude that each layer's output reached, by the layer's name (inf and nan
    included); `first_overflow` is the first layer whose output held an inf or a nan, or None. Each layer waits for its
    figure from the device, which is too slow for every step.
    """

    def __init__(self, model: CausalLM):
        super().__init__()
        self.model = model
        self.largest: dict[str, float] = {}
        self.first_overflow: str | None = None

    def __enter__(self) -> Self:
        for i, layer in enumerate(self.model.model.layers):
            self.enter_context(layer.register_forward_hook(functools.partial(self._see, f"model.layers.{i}")))
        return self

    def _see(self, name: str, layer: nn.Module, inputs: tuple, output: Tensor) -> None:
        largest = output.detach().abs().max().item()  # nan if there is one
        before = self.largest.get(name, 0.0)
        # A nan once seen stays: it compares as neither greater nor less.
        self.largest[name] = before if before != before or largest <= before else largest
        if self.first_overflow is None and not largest < float("inf"):
            self.first_overflow = name

    def report(self) -> str:
        """One line: the layer that overflowed first, if any, and how large activations were before that."""
        finite = {name: size for name, size in self.largest.items() if size < float("inf")}
        name = max(finite, key=finite.get, default=None)
        peak = f"the largest finite activation was {finite[name]:,.0f}, after {name}" if name else "none was finite"
        if self.first_overflow is None:
            return f"no layer overflowed; {peak}"
        return f"{self.first_overflow} was the first layer to give inf or nan; {peak} (fp16 ends at {FP16_MAX:,.0f})"


def explain_overflow(model: CausalLM, forward: Callable[[], object]) -> str:
    """ActivationWatch's report on one more run of `forward`: which layer overflowed first, or that none did."""
    with torch.no_grad(), ActivationWatch(model) as watch:
        forward()
    return watch.report()
