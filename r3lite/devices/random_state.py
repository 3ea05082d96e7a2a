"""Saves and restores the states of PyTorch's default generators, from which dropout draws."""

import torch
from torch import Tensor


def random_state() -> dict[str, Tensor]:
    """Returns the states of PyTorch's default generators as bytes, by device: `cpu`, `cuda.0`, `mps`."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # else get_rng_state_all would start CUDA, in a run on the CPU too
        for i, state in enumerate(torch.cuda.get_rng_state_all()):
            states[f"cuda.{i}"] = state
    if torch.backends.mps.is_available():
        states["mps"] = torch.mps.get_rng_state()
    return states


def set_random_state(states: dict[str, Tensor]) -> None:
    """Restores the states of `random_state`; those of devices that this machine lacks are ignored."""
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_initialized():
        for i in range(torch.cuda.device_count()):
            if f"cuda.{i}" in states:
                torch.cuda.set_rng_state(states[f"cuda.{i}"], i)
    if "mps" in states and torch.backends.mps.is_available():
        torch.mps.set_rng_state(states["mps"])
