"""Forward hooks on a model: a watch on the size of activations."""

import contextlib
import functools
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from r3lite.core.errors import NotFinite
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
            hook = functools.partial(self._record, f"model.layers.{i}")
            self.enter_context(layer.register_forward_hook(hook))
        return self

    def _record(
        self,
        name: str,
        layer: nn.Module,
        inputs: tuple,
        output: Tensor,
    ) -> None:
        magnitude = output.detach().abs().max().item()  # nan if there is one
        largest = self.largest.setdefault(name, 0.0)
        is_nan = largest != largest  # a nan stays the largest, though it compares as neither greater nor less
        if not is_nan and not magnitude <= largest:
            self.largest[name] = magnitude
        if self.first_overflow is None and not magnitude < float("inf"):
            self.first_overflow = name

    def report(self) -> str:
        """Returns one line: the layer that overflowed first, if any, and how large activations were until then."""
        finite = {name: size for name, size in self.largest.items() if size < float("inf")}
        name = max(finite, key=finite.get, default=None)
        peak = "none was finite"
        if name:
            peak = f"the largest finite activation was {finite[name]:,.0f}, after {name}"
        if self.first_overflow is None:
            return f"no layer overflowed; {peak}"
        return f"{self.first_overflow} was the first layer to give inf or nan; {peak} (fp16 ends at {FP16_MAX:,.0f})"


def explain_overflow(model: CausalLM, forward: Callable[[], object]) -> str:
    """Runs `forward` once more and returns ActivationWatch's report: which layer overflowed first, or that none did."""
    with torch.no_grad(), ActivationWatch(model) as watch:
        forward()
    return watch.report()


def overflow_error(model: CausalLM, tokens: list[int], question_id: str) -> NotFinite:
    """Returns the error for the tokens of an episode whose logits are not finite. It names the layer that overflowed
    first."""
    input_ids = torch.tensor([tokens], device=model.head_weight.device)
    where = explain_overflow(model, lambda: model(input_ids))
    return NotFinite(
        f"question {question_id}: the model's logits are not finite: {where}",
        "Pass --dtype bf16 or --dtype fp32, which have a larger range, or start from another --adapter.",
        code="logits-not-finite",
    )
