"""NF4, the 4-bit format of QLoRA (arXiv 2305.14314): weights as 4-bit codes.

Owns the arithmetic of the format and its layout on disk; knows nothing of model folders or adapters.

A weight [out, in] is cut into blocks of 64 neighbours of a row. A block is stored as its largest magnitude (absmax) and
64 codes, two a byte; each number is the absmax times one of the 16 code points. The absmax values are quantized as well
("double quantization"): their mean is subtracted, and each group of 256 becomes whole numbers in [-127, 127] times one
fp32 scale. (The paper uses an 8-bit float. Centred absmax values lie within a few standard deviations, so evenly spaced
steps are as accurate.)
A number of the weight takes 1/2 + 1/64 + 8/16384 = 0.516 bytes: its code, and its part of the block's absmax and of
the group's scale and mean.

In a model folder, `config.json` has LAYOUT as its `quantization_config`. In place of `<linear>.weight`, each linear of
the layers has the four tensors of `Nf4Weight`: `<linear>.codes`, `.absmax`, `.absmax_scale` and `.absmax_mean`. Biases,
norms, embedding and head are stored as in a dense checkpoint.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from r3lite.core.errors import R3LiteError
from r3lite.models.stacks import side_by_side

# As published with the paper (bitsandbytes): quantiles of the normal distribution, scaled to [-1, 1]. Eight points are
# positive, seven negative, and zero is exact.
POINTS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
BLOCK = 64  # weights that share an absmax
GROUP = 256  # absmax values that share a scale
METHOD = "r3lite_nf4"
LAYOUT = {"quant_method": METHOD, "block_size": BLOCK, "double_block_size": GROUP}
TILE = 2**19  # weights converted at once: 5 to 7 MiB of temporaries. Smaller tiles are slower, larger ones no faster.


@dataclass(frozen=True)
class Nf4Weight:
    """A weight [out, in] in NF4."""

    codes: Tensor  # uint8 [out, in / 2]; the first weight of a pair is in the high four bits
    # int8 [groups, 256]: one number for each block, row by row; the last group is padded with zeros. The absmax of a
    # block is its number times the group's scale, plus the mean. In weights from another program's file
    # (bitsandbytes_weights.py) the numbers are fp32, the scales 1 and the mean 0.
    absmax: Tensor
    absmax_scale: Tensor  # fp32 [groups]
    # fp32 [groups]: the mean, repeated for each group, so that weights with different means can be stacked.
    absmax_mean: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        rows, pairs = self.codes.shape
        return rows, 2 * pairs

    @property
    def device(self) -> torch.device:
        return self.codes.device


@dataclass(frozen=True)
class Packed:
    """For the memory plan: counts of what a folder in NF4 has but `quantize` never makes; 0 in our own folders."""

    dense_weights: int = 0  # weights that are not in NF4
    fp32_blocks: int = 0  # blocks whose absmax is in fp32


@torch.no_grad()
def quantize(weight: Tensor) -> Nf4Weight:
    """Returns the NF4 form of a weight [out, in] of any float dtype: the code points nearest to weight / absmax.

    It is computed a tile of rows at a time, to keep temporaries small. Raises R3LiteError unless `in` is a multiple of
    64.
    """
    rows, columns = weight.shape
    _check_columns(columns)
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device=weight.device)
    absmax = torch.empty(rows, columns // BLOCK, device=weight.device)
    tile_rows = max(1, TILE // columns)
    tiles = zip(weight.split(tile_rows), codes.split(tile_rows), absmax.split(tile_rows))
    for tile, tile_codes, tile_absmax in tiles:
        blocks = tile.float().reshape(len(tile), -1, BLOCK)  # [rows, in / 64, 64]
        torch.amax(blocks.abs(), dim=-1, out=tile_absmax)
        # The absmax of a block of zeros is 0; any divisor leaves its weights 0.
        blocks = blocks / tile_absmax.masked_fill(tile_absmax == 0, 1)[..., None]
        # A number's code is how many midpoints between code points lie below it. This is three times as fast as
        # torch.bucketize.
        block_codes = torch.zeros_like(blocks, dtype=torch.uint8)
        for low, high in itertools.pairwise(POINTS):
            block_codes += blocks > (low + high) / 2
        first, second = block_codes.view(len(tile), -1, 2).unbind(-1)  # [rows, in / 2] each
        torch.add(second, first, alpha=16, out=tile_codes)  # 16 first + second
    mean = absmax.mean()
    centred = absmax.view(-1).sub_(mean)
    groups = F.pad(centred, (0, -len(centred) % GROUP)).view(-1, GROUP)
    scale = groups.abs().amax(dim=-1) / 127
    steps = groups / scale.masked_fill(scale == 0, 1)[:, None]  # a scale is 0 if all its absmax values are the mean
    return Nf4Weight(
        codes=codes,
        absmax=steps.round().to(torch.int8),
        absmax_scale=scale,
        absmax_mean=mean.expand_as(scale).clone(),
    )


def unfilled(weight: Tensor, absmax: torch.dtype = torch.int8) -> Nf4Weight:
    """Returns tensors without values for the NF4 form of a weight [out, in], on its device.

    `absmax` is the dtype of the tensor `absmax`.
    """
    rows, columns = weight.shape
    _check_columns(columns)
    groups = -(-rows * columns // (BLOCK * GROUP))
    return Nf4Weight(
        codes=torch.empty(rows, columns // 2, dtype=torch.uint8, device=weight.device),
        absmax=torch.empty(groups, GROUP, dtype=absmax, device=weight.device),
        absmax_scale=torch.empty(groups, device=weight.device),
        absmax_mean=torch.empty(groups, device=weight.device),
    )


def _check_columns(columns: int) -> None:
    if columns % BLOCK:
        raise R3LiteError(
            f"a layer with {columns} input features cannot be quantized: NF4 has blocks of {BLOCK}",
            "Pass --quantize none.",
            code="nf4-columns",
        )


@torch.no_grad()
def dequantize(weights: Sequence[Nf4Weight], dtype: torch.dtype) -> Tensor:
    """Returns weights [n, in], one below the other, in `dtype`: [sum of n, in].

    On a CPU they are computed in fp32 and rounded once, a tile at a time, so that temporaries stay in the cache. On
    other devices all are computed at once, because starting a kernel costs more; there, if `dtype` is half precision,
    the code points are rounded to fp16 first. Several weights that lie one after another in memory take no more
    operations than a single weight.
    """
    codes = side_by_side([weight.codes for weight in weights])  # [rows, in / 2]
    absmax = _absmax(weights)  # [blocks]
    rows = len(codes)
    columns = 2 * codes.shape[1]
    dense = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    on_cpu = codes.device.type == "cpu"
    point_dtype = torch.float32 if on_cpu or dtype == torch.float32 else torch.float16
    pairs = _pairs(codes.device, point_dtype)
    tile_rows = max(1, TILE // columns) if on_cpu else rows
    tiles = zip(
        codes.split(tile_rows),
        absmax.view(rows, -1, 1).split(tile_rows),
        dense.split(tile_rows),
        strict=True,
    )
    for tile_codes, tile_absmax, tile in tiles:
        blocks = tile.view(len(tile), -1, BLOCK)  # [rows, in / 64, 64]
        if point_dtype == dtype:
            tile_pairs = tile.view(pairs.dtype).view(-1)  # the tile's memory, as one integer for each byte of codes
            torch.index_select(pairs, 0, tile_codes.int().view(-1), out=tile_pairs)
            blocks.mul_(tile_absmax)
        else:
            points = pairs.index_select(0, tile_codes.int().view(-1)).view(point_dtype)
            torch.mul(points.view(blocks.shape), tile_absmax, out=blocks)
            del points  # before the next tile's are made
    return dense


def _absmax(weights: Sequence[Nf4Weight]) -> Tensor:
    """Returns the fp32 absmax [blocks] of all blocks of several weights."""
    parts = [_absmax_of_one(weight) for weight in joined(weights)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def joined(weights: Sequence[Nf4Weight]) -> list[Nf4Weight]:
    """Joins weights [n, in] into one weight [sum of n, in], in a list with one element.

    If the last absmax group of any weight is padded, the weights are returned as they are: in a joined weight, the
    padding would be taken for absmax values.
    """
    if len(weights) == 1 or any(weight.codes.numel() * 2 % (BLOCK * GROUP) for weight in weights):
        return list(weights)
    joined_weight = Nf4Weight(
        codes=side_by_side([weight.codes for weight in weights]),
        absmax=side_by_side([weight.absmax for weight in weights]),
        absmax_scale=side_by_side([weight.absmax_scale for weight in weights]),
        absmax_mean=side_by_side([weight.absmax_mean for weight in weights]),
    )
    return [joined_weight]


def _absmax_of_one(weight: Nf4Weight) -> Tensor:
    """Returns the fp32 absmax [blocks] of a weight."""
    absmax = torch.addcmul(weight.absmax_mean[:, None], weight.absmax, weight.absmax_scale[:, None])
    blocks = weight.codes.numel() * 2 // BLOCK
    return absmax.view(-1)[:blocks]


def dense_blocks(
    weight: Nf4Weight,
    points: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Returns a weight's blocks [blocks, 64] in `dtype`, computed in fp32; `points` is the result of `code_points`.

    The numbers are those of `dequantize` up to rounding. A compiler can make one kernel of this code: each number
    depends on its byte and its block alone, and no tensors are joined.
    """
    codes = weight.codes.view(-1, BLOCK // 2, 1)  # [blocks, 32, 1]
    absmax = _absmax_of_one(weight)[:, None]
    shifts = torch.arange(4, -1, -4, dtype=torch.uint8, device=codes.device)  # 4 and 0: for the two codes of a byte
    code_pairs = (codes >> shifts) & 15  # [blocks, 32, 2]
    block_points = points[code_pairs.int()].flatten(1)  # [blocks, 64]
    return (block_points * absmax).to(dtype)


@functools.cache
def code_points(device: torch.device) -> Tensor:
    """Returns POINTS in fp32 on a device."""
    return torch.tensor(POINTS).to(device, non_blocking=True)


@functools.cache
def _pairs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Returns a table [256] that has, for each byte of codes, its two code points in `dtype`.

    The bits of the two code points are stored as one integer: selecting integers takes a third of the time of selecting
    pairs of numbers.
    """
    # This runs in a layer, where the host must not wait for the device.
    points = torch.tensor(POINTS, dtype=dtype).to(device, non_blocking=True)
    point_pairs = torch.stack((points.repeat_interleave(16), points.repeat(16)), dim=1)  # [256, 2]
    integer = torch.int64 if dtype == torch.float32 else torch.int32
    return point_pairs.view(integer).view(-1)
