"""Norm and SwiGLU against autograd's own gradients, and that they keep only what they were given."""

import pytest
import torch
import torch.nn.functional as F

from r3lite.models.functions import rms_norm, swiglu


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 5, 16, generator=generator) for _ in range(3)] + [torch.randn(16, generator=generator)]


def plain_norm(x, weight, eps):
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def gradients(function, inputs, upstream):
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    out.backward(upstream.to(out.dtype))
    return out, [x.grad for x in inputs]


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_values_and_gradients(tensors, dtype, bound):
    x, up, upstream, weight = (t.to(dtype) for t in tensors)
    for ours, theirs, inputs in (
        (lambda x, w: rms_norm(x, w, 1e-6), lambda x, w: plain_norm(x, w, 1e-6), (x, weight)),
        (swiglu, lambda gate, up: F.silu(gate) * up, (x, up)),
    ):
        got, grads = gradients(ours, inputs, upstream)
        expected, right = gradients(theirs, [t.double() for t in inputs], upstream)
        for a, b in zip((got, *grads), (expected, *right), strict=True):
            assert a.dtype == dtype and (a.double() - b).norm() / b.norm() <= bound
        with torch.no_grad():
            assert torch.equal(ours(*inputs), got)


def test_squares_beyond_fp16(tensors):
    """Residual activations of Qwen2.5 reach about 8,000: a sum of their squares is inf in fp16."""
    out = rms_norm(torch.full((1, 16), 8000.0, dtype=torch.float16), torch.ones(16, dtype=torch.float16), 1e-6)
    assert torch.allclose(out, torch.ones_like(out))


def test_only_what_was_given_is_kept(tensors):
    x, up, _, weight = tensors
    x.requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rms_norm(x, weight, 1e-6)
        swiglu(x, up)
    given = {t.data_ptr() for t in (x, up, weight)}
    assert sum(t.numel() for t in kept if t.data_ptr() not in given) == x.numel() / 16  # one number per row
