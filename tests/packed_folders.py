"""Model folders in bitsandbytes' NF4 with random numbers, and what these are by its formula, written without it."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from r3lite.models import nf4
from r3lite.models.causal_lm import CausalLM

CONFIG = {
    "quant_method": "bitsandbytes", "_load_in_4bit": True, "_load_in_8bit": False, "load_in_4bit": True,
    "load_in_8bit": False, "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "llm_int8_skip_modules": ["lm_head"],
    "llm_int8_threshold": 6.0, "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False,
}  # fmt: skip
STATE = "quant_state.bitsandbytes__nf4"


def uneven_map(generator: np.random.Generator) -> np.ndarray:
    """256 values in [-1, 1] with uneven steps, as bitsandbytes' 8-bit map has."""
    half = np.sort(10 ** generator.uniform(-7, 0, 127))
    return np.concatenate([-half[::-1], [0.0], half, [1.0]]).astype(np.float32)


def pack(shape: tuple[int, int], seed: int, double: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors of a packed weight with random numbers, by the end of their names, and the weight by the formula."""
    generator = np.random.default_rng(seed)
    numbers = shape[0] * shape[1]
    blocks = numbers // 64
    codes = generator.integers(0, 256, numbers // 2, dtype=np.uint8)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
    parts = {"": codes[:, None], ".quant_map": np.array(nf4.POINTS, dtype=np.float32)}
    if double:
        steps, table = generator.integers(0, 256, blocks, dtype=np.uint8), uneven_map(generator)
        scales = generator.uniform(0.01, 0.03, -(-blocks // 256)).astype(np.float32)
        offset = np.float32(generator.uniform(0.05, 0.1))
        absmax = table[steps] * np.repeat(scales, 256)[:blocks] + offset  # two roundings to fp32
        parts |= {".absmax": steps, ".nested_absmax": scales, ".nested_quant_map": table}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
    else:
        absmax = parts[".absmax"] = generator.uniform(0.01, 0.1, blocks).astype(np.float32)
    pairs = np.stack([codes >> 4, codes & 15], axis=1).reshape(blocks, 64)
    weight = np.array(nf4.POINTS, dtype=np.float32)[pairs] * absmax[:, None]
    parts[f".{STATE}"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors = {f"weight{end}": torch.from_numpy(part.copy()) for end, part in parts.items()}
    return tensors, torch.from_numpy(weight).view(shape)


def write_packed(write_folder, model: CausalLM, folder: Path, double: bool = True, dense: tuple[str, ...] = ()) -> Path:
    """A folder of the model's sizes whose layers are packed, but for those in `dense`; the model gets its numbers."""
    stored, plain = {}, {}
    for seed, (name, parameter) in enumerate(model.named_parameters()):
        path = name.removesuffix(".weight")
        if ".layers." not in name or not name.endswith("_proj.weight") or path in dense:
            stored[name] = plain[name] = parameter.detach().clone()
            continue
        tensors, plain[name] = pack(tuple(parameter.shape), seed, double)
        stored |= {f"{path}.{end}": tensor for end, tensor in tensors.items()}
    model.load_state_dict(plain)
    skipped = CONFIG | {"llm_int8_skip_modules": ["lm_head", *dense], "bnb_4bit_use_double_quant": double}
    write_folder(model, folder, quantization_config=skipped)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return folder
