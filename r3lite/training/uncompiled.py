"""Optimizers that do not import PyTorch's compiler.

PyTorch wraps the methods of optimizers for torch.compile. The wrappers import the compiler when they are first called,
which takes a second and 80 MiB. r3lite never compiles an optimizer.
"""

import inspect

import torch
from torch.optim import Optimizer


class Uncompiled(Optimizer):
    """The methods of Optimizer without their wrappers."""

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)


class UncompiledAdamW(Uncompiled, torch.optim.AdamW):
    """AdamW, whose `step` is without its wrapper, too."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))
