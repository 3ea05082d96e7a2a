"""Full fine-tuning's gradients: those of autograd, each handed out once, the last layer first, and dropped."""

import pytest
import torch

from r3lite.core.grant import Grant, Memory
from r3lite.models import activation_checkpointing
from r3lite.models.full_tuning import FullTuning
from r3lite.models.functions import geglu
from r3lite.models.gemma import GemmaLayer, ZeroCentredRMSNorm
from r3lite.models.logprobs import cross_entropy, token_loss
from r3lite.models.packing import states_before
from tests.lfm2_models import switches
from tests.models.test_delta_rows import LIKE_QWEN35

ROWS = [[5, 6, 7, 5, 9, 5, 11], [3, 4, 5]]


def loss_of(model, head_grad=None):
    hidden, targets = states_before(model, ROWS, [[1] * len(row) for row in ROWS])
    head = model.head_weight[:290]  # the rest is padding
    if head_grad is None:
        return torch.nn.functional.cross_entropy(hidden @ head.t(), targets, reduction="sum")
    return token_loss(hidden, head, targets, cross_entropy, chunk=3, head_grad=head_grad[:290])[0]


GEMMA = {"norm": ZeroCentredRMSNorm, "activation": geglu, "layer": GemmaLayer, "qk_norm": True, "qkv_bias": False,
         "embedding_multiplier": 8.3, "rounds_multiplier": True, "logits_scaling": 3.0}  # fmt: skip


FAMILIES = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "gemma": GEMMA,
    "lfm2": switches(3),
    "qwen3_5": LIKE_QWEN35,
}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
@pytest.mark.parametrize("memory", [Memory(recompute_layers=3, mlp_tile=4), Memory(recompute_layers=1)])
def test_gradients_are_those_of_autograd(small_model, family, memory):
    plain = small_model(**family).requires_grad_()
    (loss_of(plain) / 8).backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}

    model = small_model(**family)
    grads = {}
    order = []
    names = {p: name for name, p in model.named_parameters()}

    def apply(parameter, grad):
        assert names[parameter] not in grads and parameter.grad is None
        grads[names[parameter]] = grad.clone()
        order.append(names[parameter])

    activation_checkpointing.enable(model, Grant(memory))
    full = FullTuning(model, apply)
    for _ in range(2):  # a second pass begins anew
        grads.clear()
        (loss_of(model, full.head_gradient()) / 8).backward()
        assert {name.split(".")[2] for name in grads} == {"0", "1", "2"}  # by now, all of the layers'
        full.apply_last()
    assert grads.keys() == wanted.keys()
    for name, grad in wanted.items():
        atol = 1e-6
        if family is LIKE_QWEN35:  # whose gradients are large, and come from sums over many tokens
            atol = 1e-4 * grad.abs().max().item()
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=atol, msg=name)
    layers = [name.split(".")[2] for name in order if ".layers." in name]
    assert layers[: len(layers) // 2] == sorted(layers[: len(layers) // 2], reverse=True)


def test_a_pass_without_gradients_hands_out_none(small_model):
    model = small_model()
    activation_checkpointing.enable(model, Grant(Memory(recompute_layers=3)))
    full = FullTuning(model, lambda *_: pytest.fail("a gradient"))
    with torch.no_grad():
        loss_of(model)
    assert full.read is None and full.head_grad is None
