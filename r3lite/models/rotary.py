"""Rotary positions (arXiv 2104.09864): the angles by which queries and keys are turned, and how they are scaled."""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeScaling:
    """The frequency scaling of the rotary embedding of Llama 3.1 and later; names as in `config.json`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class LinearScaling:
    """The frequency scaling of `rope_type` linear: all frequencies are divided by `factor` (arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True)
class Rope:
    """The rotary positions of a layer: the base of the divisors, and their scaling."""

    theta: float
    scaling: RopeScaling | LinearScaling | None = None
    dims: int | None = None  # how many numbers of a head have positions, the first ones; None: all


def rotary_divisors(head_dim: int, theta: float) -> Tensor:
    """Returns theta^(2i / D) for the pairs i of a head, as [D/2]: pair i is rotated by position / theta^(2i / D)."""
    return theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def divisor_factors(divisors: Tensor, scaling: RopeScaling | LinearScaling) -> Tensor:
    """Returns the factors [D/2] of the divisors; all are the same if the scaling is linear.

    In Llama 3.1 (arXiv 2407.21783, section 3.4.2; `rope_type` llama3) a pair that turns more than `high_freq_factor`
    times within the original length keeps its frequency, one that turns less than `low_freq_factor` times has it
    divided by `factor`, and between the two it is interpolated.
    """
    if isinstance(scaling, LinearScaling):
        return torch.full_like(divisors, scaling.factor)
    turns = scaling.original_max_position_embeddings / (2 * math.pi * divisors)
    interpolated_turns = scaling.high_freq_factor - scaling.low_freq_factor
    unscaled_share = (turns - scaling.low_freq_factor) / interpolated_turns
    unscaled_share = unscaled_share.clamp(0, 1)
    return 1 / ((1 - unscaled_share) / scaling.factor + unscaled_share)


@functools.cache
def _head_divisors(rope: Rope, head_dim: int, device: torch.device) -> Tensor:
    """Returns the divisors [D] of a whole head, negative in its first half, for the signs of `functions.rotate_`.

    A rotation by an angle a turns the numbers (x, y) of a pair into (x cos a - y sin a, y cos a + x sin a). Because
    cos(-a) = cos a and sin(-a) = -sin a, angles of -a in the first half give that minus sign, once for all layers.
    """
    half = rotary_divisors(head_dim, rope.theta)
    if rope.scaling:
        half = half * divisor_factors(half, rope.scaling)
    return torch.cat((-half, half)).to(device, non_blocking=True)


def rotary_angles(
    positions: Tensor,
    rope: Rope | None,
    head_dim: int,
    dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None]:
    """Returns cosines and sines [B, T, 1, D] of positions [B, T] (arXiv 2104.09864), for functions.rotate_.

    The angles are computed in fp32, the results are in `dtype`. In the first half of a head the sines are negated, see
    `_head_divisors`. D is the size of a head, or the rope's `dims`. Both results are None for a layer whose queries and
    keys are not rotated.
    """
    if rope is None:
        return None, None
    head_divisors = _head_divisors(rope, rope.dims or head_dim, positions.device)
    angles = positions[:, :, None, None] / head_divisors  # [B, T, 1, D]
    cos = torch.empty(angles.shape, dtype=dtype, device=angles.device)
    sin = torch.empty(angles.shape, dtype=dtype, device=angles.device)
    torch.cos(angles, out=cos)
    torch.sin(angles, out=sin)
    return cos, sin
