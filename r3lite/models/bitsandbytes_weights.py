"""Weights in NF4 as bitsandbytes stores them, in the folders called *-bnb-4bit, read as `nf4` holds them.

Owns their layout. The codes of a layer are in `<linear>.weight`, in the order of `Nf4Weight.codes`; beside them are
`<linear>.weight.absmax`, `.nested_absmax` and the like, and as `.quant_state.bitsandbytes__nf4` a JSON text. Layers
without that are dense, as those that `llm_int8_skip_modules` names.

If absmax is quantized as well, it is nested_quant_map[absmax] * nested_absmax + nested_offset, with a nested_absmax for
every 256. The steps of that map are not even, so whole numbers do not hold these values. They are kept in fp32, which
loses nothing and takes 59 MiB more for 1.5B.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from r3lite.core.errors import R3LiteError
from r3lite.core.files import within
from r3lite.core.records import Record, Source, shown
from r3lite.models.nf4 import BLOCK, GROUP, Nf4Weight

METHOD = "bitsandbytes"
STATE = ".weight.quant_state.bitsandbytes__nf4"
# What `quantization_config` must say, and what a key that it lacks means.
WANTED = {"load_in_8bit": False, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "uint8"}
DEFAULTS = {"load_in_8bit": False, "bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": "uint8"}
REMEDY = "Use the model's unquantized checkpoint, with --quantize nf4 for NF4."


def unsupported(quantization: dict[str, Any]) -> str | None:
    """What is not read of a `quantization_config`, by its key; None if all is."""
    for key, wanted in {"quant_method": METHOD, **WANTED}.items():
        value = quantization.get(key)
        if (DEFAULTS.get(key) if value is None else value) != wanted:
            return f"quantization_config.{key} is {shown(value)}, not {shown(wanted)}"
    return None


def packed_layers(names: Iterable[str]) -> set[str]:
    """The paths of the layers that are in NF4, of the names of a folder's tensors."""
    return {name.removesuffix(STATE) for name in names if name.endswith(STATE)}


def unpack(file: Path, path: str, shape: tuple[int, int], read: Callable[[str], Tensor]) -> Nf4Weight:
    """The weight [out, in] of the layer `path`, of tensors that `read` gives by name; its numbers are bitsandbytes'.

    Raises R3LiteError naming what is not of the type or size that it must have.
    """
    numbers = shape[0] * shape[1]
    blocks = numbers // BLOCK
    text = bytes(read(f"{path}{STATE}").to(torch.uint8).flatten().tolist()).decode(errors="replace")
    where = f"{file}: {path}{STATE}"
    state = Record(within(where, REMEDY, text), Source(where, REMEDY))
    nested = "nested_blocksize" in state
    wanted = {"quant_type": "nf4", "blocksize": BLOCK, "shape": list(shape)}
    for key, value in (wanted | ({"nested_blocksize": GROUP, "nested_dtype": "float32"} if nested else {})).items():
        if state.values.get(key) != value:
            raise state.wrong(key, shown(value))

    def part(name: str, dtype: torch.dtype, size: int) -> Tensor:
        tensor = read(f"{path}.weight{name}")
        if tensor.dtype != dtype or tensor.numel() != size:
            found = f"{tensor.numel()} numbers of type {tensor.dtype}"
            raise R3LiteError(
                f"{file}: {path}.weight{name} has {found}, not {size} of {dtype}", REMEDY, code="bnb-weight-differs"
            )
        return tensor.flatten()

    codes = part("", torch.uint8, numbers // 2).view(shape[0], -1)
    absmax = part(".absmax", torch.uint8 if nested else torch.float32, blocks)
    groups = -(-blocks // GROUP)
    if nested:
        scale = part(".nested_absmax", torch.float32, groups).repeat_interleave(GROUP)[:blocks]
        absmax = part(".nested_quant_map", torch.float32, 256)[absmax.int()] * scale + state.number("nested_offset")
    absmax = F.pad(absmax, (0, -blocks % GROUP)).view(groups, GROUP)
    return Nf4Weight(codes, absmax, torch.ones(groups), torch.zeros(groups))
