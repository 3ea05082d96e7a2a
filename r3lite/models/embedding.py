"""An embedding that costs nothing where its values are read from a file."""

import torch
from torch import nn


def embedding(rows: int, size: int) -> nn.Embedding:
    """An embedding [rows, size]; on the meta device its values, which there are none of, are not drawn.

    PyTorch would import its compiler to draw them: two seconds at the start of every command.
    """
    on_meta = torch.get_default_device().type == "meta"
    return nn.Embedding(rows, size, _weight=torch.empty(rows, size) if on_meta else None)
