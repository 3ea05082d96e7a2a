import math

import torch

from r3lite.rl.losses import clipped_surrogate, k1_kl, k3_kl, value_loss


def test_clipped_surrogate_by_hand():
    """Ratios 1.5 and 0.5 with clip 0.2 / 0.28, advantages of both signs."""
    old = torch.zeros(4)
    new = torch.tensor([math.log(1.5), math.log(1.5), math.log(0.5), math.log(0.5)])
    advantages = torch.tensor([2.0, -2.0, 2.0, -2.0])
    # A > 0: min(3, 2.56) = 2.56 at r 1.5, min(1, 1.6) = 1 at r 0.5; A < 0: min(-3, -2.56) = -3, min(-1, -1.6) = -1.6
    expected = torch.tensor([-2.56, 3.0, -1.0, 1.6])
    loss, metrics = clipped_surrogate(new - old, advantages, 0.2, 0.28)
    assert torch.allclose(loss, expected)
    assert metrics["clip_ratio/low_mean"].tolist() == [False, False, False, True]
    assert metrics["clip_ratio/high_mean"].tolist() == [True, False, False, False]


def test_clipped_tokens_have_no_gradient():
    new = torch.tensor([math.log(1.5), math.log(1.1)], requires_grad=True)
    loss, _ = clipped_surrogate(new, torch.ones(2), 0.2, 0.2)
    loss.sum().backward()
    assert new.grad[0] == 0 and torch.isclose(new.grad[1], torch.tensor(-1.1))


def test_value_loss_by_hand():
    # old 0, return 1, clip 0.2. V = 0.5: clipped to 0.2, max(0.25, 0.64) / 2 = 0.32. V = 0.1: not clipped, 0.81 / 2
    # V = -0.5: clipped to -0.2: max(2.25, 1.44) / 2 = 1.125
    got = value_loss(torch.tensor([0.5, 0.1, -0.5]), torch.zeros(3), torch.ones(3), 0.2)
    assert torch.allclose(got, torch.tensor([0.32, 0.405, 1.125]))


def test_kl_estimates_by_hand():
    logp, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.0])
    # d = -1: e^-1 + 1 - 1 = 0.36788; d = 1: e - 1 - 1 = 0.71828
    assert torch.allclose(k3_kl(logp, ref), torch.tensor([0.3678794, 0.7182818]))
    assert torch.allclose(k1_kl(logp, ref), torch.tensor([1.0, -1.0]))


def test_k3_estimates_the_kl_divergence():
    """Its expectation under the policy is the divergence itself."""
    torch.manual_seed(0)
    p, q = torch.randn(6).log_softmax(0), torch.randn(6).log_softmax(0)
    exact = (p.exp() * (p - q)).sum()
    assert torch.isclose((p.exp() * k3_kl(p, q)).sum(), exact, atol=1e-6)
