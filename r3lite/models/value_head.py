"""The critic of PPO: one linear map from the shared trunk's hidden state to a value."""

import torch
from torch import Tensor, nn


class ValueHead(nn.Module):
    """V(s) = w h + b. The weights are fp32 and zero at the start, so a new critic values every state at 0."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        """Values [...] of hidden states [..., C], fp32 even under autocast, which leaves elementwise products alone."""
        return (hidden.float() * self.weight).sum(-1) + self.bias
