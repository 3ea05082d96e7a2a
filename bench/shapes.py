"""Model folders of a published shape, but with few layers and random weights, so that no download is needed."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.options import HUB
from r3lite.memory.known_models import QWEN25, QWEN_TOKENS
from r3lite.models.causal_lm import CausalLM, ModelConfig
from r3lite.models.weights import resolve_folder

SHAPES = {size: QWEN25[HUB[size]] for size in HUB}


def write_folder(where: Path, shape: ModelConfig, tokens: int = QWEN_TOKENS) -> str:
    """Makes a model folder in bf16 with a tokenizer of so many tokens, and returns its name.

    The tokenizer is the tiny model's, filled up with tokens that no text has.
    """
    write_tokenizer(where, shape, tokens)
    with torch.device("meta"):
        named = dict(CausalLM(shape).named_parameters())
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.empty(p.shape, dtype=torch.bfloat16).normal_("norm" in name, 0.02, generator=generator)
        for name, p in named.items()
    }
    save_file(tensors, where / "model.safetensors", {"format": "pt"})
    return str(where)


def write_tokenizer(where: Path, shape: ModelConfig, tokens: int = QWEN_TOKENS) -> None:
    """Makes a folder with all of a model but its weights."""
    where.mkdir(parents=True)
    sizes = {name: value for name, value in vars(shape).items() if isinstance(value, int | float)}
    config = dict(sizes, model_type="qwen2", architectures=["Qwen2ForCausalLM"], hidden_act="silu")
    (where / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}), encoding="utf-8")
    tiny = resolve_folder("tiny")
    shutil.copy(tiny / "tokenizer_config.json", where)
    definition = json.loads((tiny / "tokenizer.json").read_text(encoding="utf-8"))
    known, added = definition["model"]["vocab"], definition["added_tokens"]
    last = tokens - len(added)  # the added tokens come after all others
    known |= {f"filler {i}": i for i in range(1 + max(known.values()), last)}
    for i, token in enumerate(added, last):
        token["id"] = i
    (where / "tokenizer.json").write_text(json.dumps(definition), encoding="utf-8")
