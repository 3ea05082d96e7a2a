"""The critic's head."""

import torch

from r3lite.models.value_head import ValueHead


def test_a_fresh_head_values_everything_at_zero():
    head = ValueHead(8)
    assert torch.equal(head(torch.randn(2, 5, 8)), torch.zeros(2, 5))


def test_values_by_hand_and_gradients_into_the_trunk():
    head = ValueHead(2)
    head.weight.data, head.bias.data = torch.tensor([2.0, -1.0]), torch.tensor(0.5)
    hidden = torch.tensor([[1.0, 3.0], [4.0, 0.0]], requires_grad=True)
    values = head(hidden)
    assert values.tolist() == [-0.5, 8.5]
    values.sum().backward()
    assert hidden.grad.tolist() == [[2.0, -1.0], [2.0, -1.0]]
    assert head.weight.grad.tolist() == [5.0, 3.0] and head.bias.grad == 2


def test_values_are_fp32_under_autocast():
    head = ValueHead(64)
    torch.nn.init.normal_(head.weight)
    hidden = torch.randn(3, 64).half()
    with torch.autocast("cpu", torch.float16):
        values = head(hidden)
    assert values.dtype == torch.float32
    assert torch.allclose(values, hidden.float() @ head.weight, atol=1e-5)
