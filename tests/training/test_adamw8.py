"""AdamW with moments of 8 bits: it follows AdamW, its rounding loses nothing in the mean, and its state is exact."""

import pytest
import torch
from torch import nn

from r3lite.devices.precision import NonFiniteGradients
from r3lite.training import optim
from r3lite.training.adamw8 import BLOCK, AdamW8, decoded, encoded
from tests.errors import raises


def weights(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"wide.weight": (32, 256), "norm.weight": (40,)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()}


def gradients(step: int, like: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """The same in each step but for noise, of sizes that differ from block to block by many powers of ten."""
    generator = torch.Generator().manual_seed(step)
    steady = torch.Generator().manual_seed(1)
    grads = {}
    for name, p in like.items():
        size = 10.0 ** torch.randint(-6, 1, (len(p), *[1] * (p.dim() - 1)), generator=steady)
        grads[name] = size * (torch.randn(p.shape, generator=steady) + torch.randn(p.shape, generator=generator))
    return grads


def trained(steps: int, dtype: torch.dtype = torch.float32, **settings) -> tuple[AdamW8, dict[str, nn.Parameter]]:
    named = weights(dtype)
    optimizer = AdamW8(named, **{"rate": 1e-3, "weight_decay": 0.0, "max_norm": 1e9, "seed": 0} | settings)
    for step in range(steps):
        for name, grad in gradients(step, named).items():
            optimizer.update(named[name], grad.to(dtype))
        optimizer.end_step()
    return optimizer, named


def reference(steps: int, **settings) -> dict[str, nn.Parameter]:
    named = weights()
    optimizer = torch.optim.AdamW(named.values(), lr=1e-3, **{"weight_decay": 0.0} | settings)
    for step in range(steps):
        for name, grad in gradients(step, named).items():
            named[name].grad = grad
        optimizer.step()
    return named


def test_small_tensors_are_updated_as_by_adamw():
    ours, theirs = trained(20)[1], reference(20)
    torch.testing.assert_close(ours["norm.weight"], theirs["norm.weight"])


def test_moments_of_8_bits_follow_adamw():
    """In blocks of all sizes of gradients: a scale for a whole tensor would lose the small ones."""
    ours, theirs, start = trained(40)[1], reference(40), weights()
    moved, wanted = (x["wide.weight"].detach() - start["wide.weight"].detach() for x in (ours, theirs))
    assert (moved - wanted).norm() < 0.07 * wanted.norm()
    by_row = (moved - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert by_row.max() < 0.1


def test_decay_spares_norms():
    decayed = trained(1, weight_decay=0.5)[1]
    plain = trained(1)[1]
    assert torch.equal(decayed["norm.weight"], plain["norm.weight"])
    start = weights()["wide.weight"]
    torch.testing.assert_close(plain["wide.weight"] - decayed["wide.weight"], 1e-3 * 0.5 * start, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("mantissa", [3, 4])
def test_codes_are_right_in_the_mean(mantissa):
    values = torch.linspace(1e-3, 1, BLOCK)[None] * (
        1 if mantissa == 4 else torch.tensor([1.0, -1.0]).repeat(BLOCK // 2)
    )
    noise = torch.arange(256, dtype=torch.int32)[:, None].expand(256, BLOCK)
    decodings = decoded(*encoded(values.expand(256, BLOCK).contiguous(), noise, mantissa), mantissa)  # all of the noise
    torch.testing.assert_close(decodings.mean(0, keepdim=True), values, rtol=2e-3, atol=0)
    step = 2.0**-mantissa
    assert ((decodings - values).abs() <= step * values.abs() * 1.01).all()
    assert torch.equal(decodings[:, -1], values[0, -1:].expand(256))  # the largest is exact


def test_zeros_stay_zeros():
    zeros, noise = torch.zeros(2, BLOCK), torch.full((2, BLOCK), 255, dtype=torch.int32)
    for mantissa in (3, 4):
        assert not decoded(*encoded(zeros, noise, mantissa), mantissa).any()
    sparse = zeros.clone()
    sparse[:, 0] = 1.0  # the others, below every code of the first moment, are not moved
    assert not decoded(*encoded(sparse, noise, 3), 3)[:, 1:].any()


def test_bf16_weights_keep_changes_below_their_step():
    """A weight of 1 in bf16 has steps of 2^-8 below it: rounded to the nearest, 1e-4 would never move it."""
    w = nn.Parameter(torch.ones(64, 1024, dtype=torch.bfloat16))
    optimizer = AdamW8({"w": w}, rate=1e-4, weight_decay=0.0, max_norm=1e9, seed=3)
    for _ in range(30):
        optimizer.update(w, torch.ones(64, 1024, dtype=torch.bfloat16))
    assert w.detach().float().mean().item() == pytest.approx(1 - 30 * 1e-4, abs=2e-4)


def test_each_tensor_is_clipped_to_its_share_of_the_norm():
    """If all are, their norm together is that of the setting."""
    named = weights()
    total = sum(p.numel() for p in named.values())
    optimizer = AdamW8(named, rate=1e-3, weight_decay=0.0, max_norm=1.0, seed=0)
    optimizer.update(named["norm.weight"], torch.full((40,), 100.0))
    optimizer.update(named["wide.weight"], torch.full((32, 256), 1e-4))
    moments = {name: optimizer.state[p]["exp_avg"] for name, p in named.items()}
    torch.testing.assert_close(moments["norm.weight"], torch.full((40,), 0.1 / total**0.5))
    scale = optimizer.state[named["wide.weight"]]["exp_avg_scale"]
    torch.testing.assert_close(scale, torch.full_like(scale, 0.1 * 1e-4))
    assert optimizer.end_step() == pytest.approx((40 * 100.0**2 + 32 * 256 * 1e-8) ** 0.5)


def test_state_goes_on_to_the_bit():
    uninterrupted, wanted = trained(6, torch.bfloat16)
    first, named = trained(3, torch.bfloat16)
    saved_state = {name: tensor.clone() for name, tensor in optim.state_tensors(first).items()}
    resumed = AdamW8(named, rate=1e-3, weight_decay=0.0, max_norm=1e9, seed=0)
    optim.load_state_tensors(resumed, saved_state)
    for step in range(3, 6):
        for name, grad in gradients(step, named).items():
            resumed.update(named[name], grad.bfloat16())
    assert all(torch.equal(named[name], wanted[name]) for name in named)
    state = optim.state_tensors(resumed)
    expected = optim.state_tensors(uninterrupted)
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in expected)


def test_a_gradient_that_is_not_finite_ends_the_step_and_spares_its_tensor():
    named = weights()
    optimizer = AdamW8(named, rate=1e-3, weight_decay=0.0, max_norm=1.0, seed=0)
    optimizer.update(named["norm.weight"], torch.full((40,), float("nan")))
    assert torch.equal(named["norm.weight"], weights()["norm.weight"])
    with raises(NonFiniteGradients, "gradients-not-finite-8bit"):
        optimizer.end_step()
