"""An embedding that costs nothing where its values are read from a file."""

import torch
from torch import nn


def embedding(rows: int, size: int) -> nn.Embedding:
    """Returns an embedding [rows, size]; on the meta device, where it has no values, none are drawn.

    PyTorch would import its compiler to draw them: two seconds at the start of every command.
    """
    weight = None
    if torch.get_default_device().type == "meta":
        weight = torch.empty(rows, size)
    return nn.Embedding(rows, size, _weight=weight)
