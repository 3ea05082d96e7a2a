"""Gradients of all of a model's weights, handed out layer by layer in the backward pass and dropped at once.

The gradients of embedding and head are computed by hand, because autograd would make several tensors [V, C]. Here one
in fp32 serves both: the loss adds the head's gradient to it, and at the end the gradients of the embedding rows that
the pass has read are added. If embedding and head are not tied, it is applied to the head and set to zeros in between.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from r3lite.models.causal_lm import CausalLM


class FullTuning:
    """Trains a model's weights: in each pass, `apply(parameter, gradient)` is called once for each weight.

    The layers come first, from the last to the first, then the final norm, the head and the embedding.

    A pass is a forward pass, one loss, which is given `head_gradient()`, the backward pass, and `apply_last()`.
    """

    def __init__(self, model: CausalLM, apply: Callable[[nn.Parameter, Tensor], None]):
        """Makes `model` trainable; before this, `activation_checkpointing.enable` must have set how it runs layers."""
        self.apply = apply
        self.embedding = model.model.embed_tokens.weight
        self.head = model.head_weight
        self.norm = model.model.norm
        self.head_grad: Tensor | None = None
        self.read: tuple[Tensor, Tensor] | None = None  # ids [B, T] of the pass, and their rows [B, T, C]
        for parameter in model.parameters():
            parameter.requires_grad_(parameter is not self.embedding and parameter is not self.head)
        model.model.embed_tokens.register_forward_hook(self._remember)
        model.run_layer = _after_each(model.run_layer, self._apply)

    def head_gradient(self) -> Tensor:
        """Returns zeros [V, C], to which a loss adds the gradient of the head."""
        self.head_grad = None  # frees the gradient of a pass that failed
        self.head_grad = torch.zeros(self.head.shape, device=self.head.device)
        return self.head_grad

    @torch.no_grad()
    def apply_last(self) -> None:
        """Applies the gradients of norm, head and embedding, which are complete after the backward pass."""
        self._apply(list(self.norm.parameters()))
        ids, rows = self.read
        grad = self.head_grad
        self.read = None
        self.head_grad = None
        if self.head is not self.embedding:
            self.apply(self.head, grad)
            grad = grad.zero_()
        # Adds up the gradients of a token's rows in a fixed order, which index_add does not.
        tokens, places = ids.flatten().unique(return_inverse=True)
        token_grads = torch.ops.aten.embedding_dense_backward(
            rows.grad.flatten(0, 1).float(),
            places,
            num_weights=len(tokens),
            padding_idx=-1,
            scale_grad_by_freq=False,
        )
        grad.index_add_(0, tokens, token_grads)
        self.apply(self.embedding, grad)

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Within the `with` block gradients are dropped."""
        apply = self.apply
        self.apply = lambda parameter, grad: None
        try:
            yield
        finally:
            self.apply = apply

    def _remember(
        self,
        module: nn.Module,
        inputs: tuple[Tensor],
        rows: Tensor,
    ) -> None:
        if torch.is_grad_enabled():
            self.read = inputs[0], rows.requires_grad_()

    def _apply(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            grad = parameter.grad
            parameter.grad = None
            self.apply(parameter, grad)


def _after_each(run: Callable[..., Tensor], apply: Callable[[list[nn.Parameter]], None]) -> Callable[..., Tensor]:
    """Returns a function that runs layers as `run` does and calls `apply` with their parameters in the backward pass.

    When the gradient of a layer's input is computed, so are those of its parameters.
    """

    def run_layer(layer, x, cos, sin, context):
        if torch.is_grad_enabled():
            x.register_hook(lambda grad: apply(list(layer.parameters())))
        return run(layer, x, cos=cos, sin=sin, context=context)

    return run_layer
