"""A model as one GGUF file, with tokenizer and chat template: what llama.cpp and Ollama read. By the package `gguf`
(extra gguf), which this file imports.

Names and keys are those that llama.cpp's own converter writes for Qwen2. Norms and biases stay in fp32, as there.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import gguf
import torch
from torch import Tensor, nn
from tqdm import tqdm

from r3lite.core.errors import R3LiteError
from r3lite.core.files import PART, read_record
from r3lite.core.records import Record
from r3lite.models import lora
from r3lite.models.qwen2 import Qwen2
from r3lite.models.weights import checkpoint_tensors
from r3lite.protocols.tokenizer import chat_template

# The pre-tokenizer that llama.cpp calls qwen2.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
REMEDY = "Use a Qwen2 tokenizer, or --form folder."
ENDINGS = {"lora_A": "lora_a", "lora_B": "lora_b"}  # PEFT's and GGUF's
TYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16", "q8_0": "Q8_0"}


def write(model: Qwen2, folder: Path, path: Path, weights: str, name: str) -> None:
    """Writes a model without adapters, with the tokenizer of `folder`; the file appears whole or not at all."""
    with _writer(path) as writer:
        _add_sizes(writer, model, name)
        _add_tokenizer(writer, folder, model.config.vocab_size)
        _add_tensors(writer, model, gguf.GGMLQuantizationType[TYPES[weights]])


def write_adapter(model: Qwen2, adapter: str, path: Path, weights: str, name: str) -> None:
    """Writes one adapter of a model, with the keys and names of llama.cpp's convert_lora_to_gguf.

    llama.cpp multiplies by alpha / r: that of rank-stabilized LoRA, which divides by the root of r, is scaled to this.
    """
    kind, config = gguf.GGMLQuantizationType[TYPES[weights]], lora.switch_of(model).configs[adapter]
    with _writer(path) as writer:
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, config.scale * config.r)
        writer.add_name(name)
        for ours, parameter in _adapter_names(model, adapter).items():
            numbers = gguf.quants.quantize(parameter.detach().float().numpy(), kind)
            writer.add_tensor(ours, numbers, raw_dtype=kind)


def _adapter_names(model: Qwen2, adapter: str) -> dict[str, nn.Parameter]:
    """The parameters of an adapter under GGUF's names."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, model.config.num_hidden_layers)
    found = {}
    for name, parameter in lora.adapter_parameters(model, adapter).items():
        path, side, _ = name.removeprefix("base_model.model.").rsplit(".", 2)
        found[f"{names.get_name(path)}.weight.{ENDINGS[side]}"] = parameter
    return found


@contextlib.contextmanager
def _writer(path: Path) -> Iterator[gguf.GGUFWriter]:
    """What a GGUF file is added to, which is written at the end of the block."""
    folder_of_all = path.parent.absolute()  # made last, so that a failure leaves nothing
    temporary = folder_of_all.with_name(f".{folder_of_all.name}.{os.getpid()}{PART}")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(temporary, "qwen2")
    try:
        yield writer
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        path.parent.mkdir(exist_ok=True)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _add_sizes(writer, model: Qwen2, name: str) -> None:
    config = model.config
    writer.add_name(name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _add_tensors(writer, model: Qwen2, wanted) -> None:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, model.config.num_hidden_layers)
    for name, tensor in tqdm(checkpoint_tensors(model).items(), desc="converting", unit="tensor", disable=None):
        kind = wanted if tensor.dim() == 2 else gguf.GGMLQuantizationType.F32
        numbers = gguf.quants.quantize(tensor.float().numpy(), kind)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), numbers, raw_dtype=kind)


def _add_tokenizer(writer, folder: Path, rows: int) -> None:
    """The byte-level BPE of `tokenizer.json`; ids up to the embedding's `rows` that it lacks are padding."""
    path = folder / "tokenizer.json"
    record = read_record(path, REMEDY)
    _check_split(record)
    model = record.record("model")
    if model.text("type") != "BPE":
        raise record.error(f"the tokenizer is of type {model.text('type')}, not BPE")
    tokens = [f"[PAD{i}]" for i in range(rows)]
    types = [gguf.TokenType.UNUSED] * rows
    for token, id in model.record("vocab").values.items():
        tokens[id], types[id] = token, gguf.TokenType.NORMAL
    for added in record.records("added_tokens"):
        id, special = added.whole("id"), added.flag("special", False)
        tokens[id] = added.text("content")
        types[id] = gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.items("merges")]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_add_bos_token(False)
    settings = read_record(folder / "tokenizer_config.json", REMEDY)
    for key, add in (("eos_token", writer.add_eos_token_id), ("pad_token", writer.add_pad_token_id)):
        if key in settings and isinstance(settings.values[key], str):
            add(tokens.index(settings.text(key)))
    writer.add_chat_template(chat_template(folder, settings))


def _check_split(record: Record) -> None:
    """Raises R3LiteError unless texts are split as llama.cpp does for Qwen2: else it would see other tokens."""
    parts = json.dumps(record.values.get("pre_tokenizer"))
    if json.dumps(SPLIT) not in parts or "ByteLevel" not in parts:
        raise R3LiteError(f"{record.source.where}: texts are not split as Qwen2's tokenizer does", REMEDY)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, in fp32, by GGUF's names."""
    tensors = gguf.GGUFReader(path).tensors
    return {t.name: torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).copy()) for t in tensors}


@torch.no_grad()
def fill(model: Qwen2, path: Path) -> None:
    """Puts the weights of a file into a model of the same sizes."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, model.config.num_hidden_layers)
    found = read_tensors(path)
    for name, tensor in checkpoint_tensors(model).items():
        tensor.copy_(found[names.get_name(name, (".weight", ".bias"))].view(tensor.shape))


@torch.no_grad()
def fill_adapter(model: Qwen2, adapter: str, path: Path) -> None:
    """Puts the weights of a file of `write_adapter` into an adapter of the same shape."""
    found = read_tensors(path)
    for name, parameter in _adapter_names(model, adapter).items():
        parameter.copy_(found[name].view(parameter.shape))
