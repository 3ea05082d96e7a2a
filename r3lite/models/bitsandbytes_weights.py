"""Weights in NF4 as bitsandbytes stores them, in the folders called *-bnb-4bit, read as `nf4` holds them.

Owns their layout. The codes of a layer are in `<linear>.weight`, in the order of `Nf4Weight.codes`; beside them are
`<linear>.weight.absmax`, `.nested_absmax` and the like, and a JSON text, `.quant_state.bitsandbytes__nf4`. A layer
without this text is dense, such as those that `llm_int8_skip_modules` names.

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
from r3lite.core.files import parse_at_place
from r3lite.core.records import Record, Source, shown
from r3lite.models.nf4 import BLOCK, GROUP, Nf4Weight

METHOD = "bitsandbytes"
STATE = ".weight.quant_state.bitsandbytes__nf4"
# The values that `quantization_config` must have, and the defaults of keys that it lacks.
REQUIRED = {
    "quant_method": METHOD,
    "load_in_8bit": False,
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_quant_storage": "uint8",
}
DEFAULTS = {"load_in_8bit": False, "bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": "uint8"}
REMEDY = "Use the model's unquantized checkpoint, with --quantize nf4 for NF4."


def unsupported(quantization: dict[str, Any]) -> str | None:
    """Returns, with its key, a value of a `quantization_config` that r3lite does not read; None if it reads all."""
    for key, required in REQUIRED.items():
        value = quantization.get(key)
        effective = DEFAULTS.get(key) if value is None else value
        if effective != required:
            return f"quantization_config.{key} is {shown(value)}, not {shown(required)}"
    return None


def packed_layers(names: Iterable[str]) -> set[str]:
    """Returns the paths of the layers that are in NF4, from the names of a folder's tensors."""
    return {name.removesuffix(STATE) for name in names if name.endswith(STATE)}


def unpack(
    file: Path,
    path: str,
    shape: tuple[int, int],
    read: Callable[[str], Tensor],
) -> Nf4Weight:
    """Returns the weight [out, in] of the layer `path`, with the numbers that bitsandbytes computes.

    `read` returns a tensor of the folder by its name. Raises R3LiteError naming a tensor or a key of the state that is
    not of the type, size or value that it must have.
    """
    numbers = shape[0] * shape[1]
    blocks = numbers // BLOCK
    state_bytes = read(f"{path}{STATE}").to(torch.uint8).flatten().tolist()
    where = f"{file}: {path}{STATE}"
    values = parse_at_place(where, REMEDY, bytes(state_bytes).decode(errors="replace"))
    state = Record(values, Source(where, REMEDY))
    nested = "nested_blocksize" in state
    required = {"quant_type": "nf4", "blocksize": BLOCK, "shape": list(shape)}
    if nested:
        required |= {"nested_blocksize": GROUP, "nested_dtype": "float32"}
    for key, value in required.items():
        if state.values.get(key) != value:
            raise state.wrong(key, shown(value))

    def part(
        name: str,
        dtype: torch.dtype,
        size: int,
    ) -> Tensor:
        tensor = read(f"{path}.weight{name}")
        if tensor.dtype != dtype or tensor.numel() != size:
            actual = f"{tensor.numel()} numbers of type {tensor.dtype}"
            raise R3LiteError(
                f"{file}: {path}.weight{name} has {actual}, not {size} of {dtype}", REMEDY, code="bnb-weight-differs"
            )
        return tensor.flatten()

    codes = part("", torch.uint8, numbers // 2).view(shape[0], -1)
    absmax = part(".absmax", torch.uint8 if nested else torch.float32, blocks)
    groups = -(-blocks // GROUP)
    if nested:
        scale = part(".nested_absmax", torch.float32, groups).repeat_interleave(GROUP)[:blocks]
        steps = part(".nested_quant_map", torch.float32, 256)
        absmax = steps[absmax.int()] * scale + state.number("nested_offset")
    absmax = F.pad(absmax, (0, -blocks % GROUP)).view(groups, GROUP)
    return Nf4Weight(
        codes=codes,
        absmax=absmax,
        absmax_scale=torch.ones(groups),
        absmax_mean=torch.zeros(groups),
    )
