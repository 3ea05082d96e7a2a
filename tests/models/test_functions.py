"""Norm, SwiGLU, convolutions and rotary positions against autograd's own gradients, and that they keep only what they
were given."""

import pytest
import torch
import torch.nn.functional as F

from r3lite.models.functions import causal_convolution, geglu, rms_norm, rotate_, swiglu
from r3lite.models.rotary import Rope, rotary_angles


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 5, 16, generator=generator) for _ in range(3)] + [torch.randn(16, generator=generator)]


def plain_norm(x, weight, eps):
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def joint(function):
    return lambda gate, up: function(torch.cat((gate, up), dim=-1))


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
        (lambda x, w: rms_norm(x, w, 1e-6, offset=1.0), lambda x, w: plain_norm(x, 1 + w, 1e-6), (x, weight)),
        (joint(swiglu), lambda gate, up: F.silu(gate) * up, (x, up)),
        (joint(geglu), lambda gate, up: F.gelu(gate, approximate="tanh") * up, (x, up)),
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


def test_weights_around_zero_are_not_rounded_with_one_added(tensors):
    """In bf16 1 + 0.003 is 1: the sum is made in fp32, as in transformers."""
    x = tensors[0].bfloat16()
    weight = torch.full((16,), 0.003).bfloat16()
    exact = rms_norm(x.float(), weight.float(), 1e-6, offset=1.0)
    assert torch.equal(rms_norm(x, weight, 1e-6, offset=1.0), exact.bfloat16())
    assert not torch.equal(rms_norm(x, 1 + weight, 1e-6), exact.bfloat16())


def test_only_what_was_given_is_kept(tensors):
    x, up, _, weight = tensors
    x.requires_grad_()
    gate_up = torch.cat((x, up), dim=-1)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        rms_norm(x, weight, 1e-6)
        swiglu(gate_up)
        rms_norm(x, weight, 1e-6, offset=1.0)
        geglu(gate_up)
    input_pointers = {t.data_ptr() for t in (x, gate_up, weight)}
    assert (
        sum(t.numel() for t in saved if t.data_ptr() not in input_pointers) == 2 * x.numel() / 16
    )  # one number per row and norm


def test_rotation_in_place(tensors):
    """Only the first heads turn; the gradient is autograd's own, and that of what was rotated is left as it was."""
    x, upstream = (torch.randn(2, 5, 6, 8, generator=torch.Generator().manual_seed(i)) for i in range(2))
    positions = torch.arange(5)[None].expand(2, -1)
    cos, sin = rotary_angles(positions, Rope(theta=100.0), head_dim=8, dtype=torch.float32)
    reference = x.clone().requires_grad_()
    ours = x.clone().requires_grad_()
    turned = reference[:, :, :4] * cos + reference[:, :, :4].roll(4, -1) * sin
    torch.cat((turned, reference[:, :, 4:]), dim=2).backward(upstream)
    upstream_copy = upstream.clone()
    out = rotate_(ours * 1, 4, cos, sin)
    out.backward(upstream)
    assert torch.allclose(out[:, :, :4], turned) and torch.equal(out[:, :, 4:], x[:, :, 4:])
    assert torch.allclose(ours.grad, reference.grad, atol=1e-6) and torch.equal(upstream, upstream_copy)
    assert torch.allclose(out.norm(dim=-1), x.norm(dim=-1), atol=1e-5)
    with torch.no_grad():
        y = x.clone()
        assert rotate_(y, 4, cos, sin).data_ptr() == y.data_ptr() and torch.equal(y, out)


@pytest.mark.parametrize("trains", [False, True])
def test_causal_convolution(trains):
    """A frozen weight needs nothing of x in the backward pass."""
    generator = torch.Generator().manual_seed(0)
    x, weight, upstream = (torch.randn(*s, generator=generator) for s in ((2, 9, 5), (5, 3), (2, 7, 5)))
    x.requires_grad_()
    weight.requires_grad_(trains)
    expected = F.conv1d(x.transpose(1, 2), weight[:, None], groups=5).transpose(1, 2)
    inputs = [x, weight] if trains else [x]
    grads = torch.autograd.grad(expected, inputs, upstream)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = causal_convolution(x, weight)
    assert torch.allclose(out, expected, atol=1e-6)
    for ours, theirs in zip(torch.autograd.grad(out, inputs, upstream), grads, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    assert sum(t.numel() for t in saved) == weight.numel() + trains * x.numel()
    with torch.no_grad():
        assert torch.equal(causal_convolution(x, weight), out)
