"""Writes model folders of a published shape with random weights, so that no download is needed."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.options import HUB
from r3lite.memory.known_models import QWEN25, QWEN_TOKENS
from r3lite.models.causal_lm import CausalLM, ModelConfig
from r3lite.models.weights import resolve_folder

NORM_MEAN = 1  # of a norm's random weights; the mean of all others is 0
WEIGHT_STD = 0.02
SHAPES = {name: QWEN25[model] for name, model in HUB.items() if model in QWEN25}


def write_folder(folder: Path, shape: ModelConfig, tokens: int = QWEN_TOKENS) -> str:
    """Writes a model folder with weights in bf16 and a tokenizer (see `write_tokenizer`); returns its path."""
    write_tokenizer(folder, shape, tokens)
    with torch.device("meta"):
        parameters = dict(CausalLM(shape).named_parameters())
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.empty(parameter.shape, dtype=torch.bfloat16).normal_(
            mean=NORM_MEAN if "norm" in name else 0, std=WEIGHT_STD, generator=generator
        )
        for name, parameter in parameters.items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def write_tokenizer(folder: Path, shape: ModelConfig, tokens: int = QWEN_TOKENS) -> None:
    """Writes all files of a model folder but the weights. The tokenizer has `tokens` tokens.

    The tokenizer is that of the tiny model, filled up with tokens that occur in no text.
    """
    folder.mkdir(parents=True)
    sizes = {name: value for name, value in vars(shape).items() if isinstance(value, int | float)}
    config = dict(sizes, model_type="qwen2", architectures=["Qwen2ForCausalLM"], hidden_act="silu")
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}), encoding="utf-8")
    tiny = resolve_folder("tiny")
    shutil.copy(tiny / "tokenizer_config.json", folder)
    definition = json.loads((tiny / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = definition["model"]["vocab"]
    added_tokens = definition["added_tokens"]  # they have the highest ids
    first_added = tokens - len(added_tokens)
    for token_id in range(1 + max(vocabulary.values()), first_added):
        vocabulary[f"filler {token_id}"] = token_id
    for token_id, token in enumerate(added_tokens, first_added):
        token["id"] = token_id
    (folder / "tokenizer.json").write_text(json.dumps(definition), encoding="utf-8")
