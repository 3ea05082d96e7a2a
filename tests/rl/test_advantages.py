import pytest
import torch

from r3lite.rl.advantages import all_equal, gae, group_normalized, masked_mean, share_without_variance, whiten


def test_gae_by_hand_without_gap():
    # delta_1 = 1 - 0.2 = 0.8; delta_0 = 0 + 0.9 * 0.2 - 0.5 = -0.32; A_0 = -0.32 + 0.9 * 0.5 * 0.8 = 0.04
    advantages, returns = gae(
        torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.2]]), torch.tensor([[True, True]]), 0.9, 0.5
    )
    assert torch.allclose(advantages, torch.tensor([[0.04, 0.8]]))
    assert torch.allclose(returns, torch.tensor([[0.54, 1.0]]))


def test_gae_bootstraps_across_an_observation_gap():
    """The last action before retrieved documents looks at the first action after them, not at a value of 0."""
    action = torch.tensor([[False, True, False, False, True, False]])
    values = torch.tensor([[9.0, 0.5, 9.0, 9.0, 0.2, 9.0]])
    rewards = torch.tensor([[0.0, 0.1, 0.0, 0.0, 1.0, 0.0]])
    advantages, returns = gae(rewards, values, action, 1.0, 0.95)
    # A_4 = 1 - 0.2 = 0.8; delta_1 = 0.1 + 0.2 - 0.5 = -0.2; A_1 = -0.2 + 0.95 * 0.8 = 0.56
    assert torch.allclose(advantages, torch.tensor([[0.0, 0.56, 0.0, 0.0, 0.8, 0.0]]))
    assert torch.allclose(returns, torch.tensor([[0.0, 1.06, 0.0, 0.0, 1.0, 0.0]]))


def test_observations_rewards_and_values_change_nothing():
    torch.manual_seed(0)
    action = torch.rand(3, 20) < 0.5
    rewards, values = torch.randn(3, 20), torch.randn(3, 20)
    expected = gae(rewards, values, action, 0.99, 0.9)
    noise = torch.randn(3, 20) * ~action * 100
    for got, want in zip(gae(rewards + noise, values - noise, action, 0.99, 0.9), expected):
        assert torch.equal(got, want)


def test_gae_equals_the_definition_on_the_compacted_actions():
    """A second computation: drop the observations, then sum (gamma lambda)^l delta_(t+l) as the paper writes it."""
    torch.manual_seed(1)
    action = torch.rand(1, 30) < 0.6
    rewards, values = torch.randn(1, 30), torch.randn(1, 30)
    r, v = rewards[action].double(), values[action].double()
    following = torch.cat((v[1:], v.new_zeros(1)))
    delta = r + 0.97 * following - v
    expected = torch.stack(
        [sum((0.97 * 0.8) ** (k - t) * delta[k] for k in range(t, len(delta))) for t in range(len(delta))]
    )
    advantages, _ = gae(rewards, values, action, 0.97, 0.8)
    assert torch.allclose(advantages[action].double(), expected, atol=1e-5)


def test_group_normalized_by_hand():
    # group 0: returns 1, 0: mean 0.5, sample std 0.70711; group 1 has no variance; group 2 is alone
    returns = torch.tensor([1.0, 2.0, 0.0, 2.0, 5.0])
    got = group_normalized(returns, torch.tensor([0, 1, 0, 1, 2]))
    assert torch.allclose(got, torch.tensor([0.7070068, 0.0, -0.7070068, 0.0, 0.0]), atol=1e-6)


def test_equal_numbers_are_whitened_to_exactly_0():
    """The rounding of their mean was divided by a std of 1e-4: 16 returns of 0.9 had advantages of 6e-4."""
    mask = torch.rand(16, 100, generator=torch.Generator().manual_seed(0)) < 0.5
    for returns in (0.1, 0.9, 1.2):
        assert whiten(returns * mask.float(), mask).abs().max() == 0


def test_share_without_variance():
    assert share_without_variance(torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])) == 0.5


def test_whitening_reads_the_mask_only():
    x, mask = torch.tensor([[1.0, 100.0, 3.0]]), torch.tensor([[True, False, True]])
    assert torch.allclose(whiten(x, mask), torch.tensor([[-1.0, 0.0, 1.0]]))
    assert masked_mean(x, mask) == pytest.approx(2.0)


def test_equal_sums_of_any_size_are_equal_up_to_their_rounding():
    """Two neighbouring numbers in fp32: the rounding of large sums was taken for a difference."""
    total = torch.tensor(8596.143)
    neighbour = total.nextafter(torch.tensor(1e9))
    assert neighbour - total > 1e-6
    assert all_equal(torch.stack([total, neighbour]))
    assert not all_equal(torch.tensor([1e5, 1e5 + 1]))
    assert all_equal(torch.tensor([0.0, 1e-7])) and not all_equal(torch.tensor([0.0, 1e-5]))
