"""A model as one GGUF file, with tokenizer and chat template: what llama.cpp and Ollama read. This module imports the
package `gguf` (extra gguf), which writes the file.

Names and keys are those that llama.cpp's own converter writes for Qwen2, Qwen3, Llama (Mistral is a Llama there),
Granite 3, SmolLM3, LFM2, Gemma 3 and Qwen3.5. Norms, biases and convolutions stay in fp32, as that converter has them.
"""

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from r3lite.core.errors import R3LiteError
from r3lite.core.files import PART, move, read_record
from r3lite.core.records import Record
from r3lite.exporting import qwen3_5
from r3lite.exporting.chats import trained_template
from r3lite.models import gemma, gguf_tokenizer, lora
from r3lite.models.causal_lm import CausalLM, ModelConfig
from r3lite.models.gguf_files import (
    GEMMA3,
    LIKE_LLAMA,
    QWEN35,
    ROPE,
    Header,
    gguf_name,
    heads_of,
    row_order,
    shift_of,
)
from r3lite.models.gguf_tokenizer import BYTES, SENTENCEPIECE, SENTENCEPIECE_SPLIT, SPACE, SPLITS, split_of
from r3lite.models.layer_kinds import NO_ROPE_INTERVAL
from r3lite.models.lfm2 import TAPS, Lfm2Layer
from r3lite.models.qwen3_5 import Qwen35Layer
from r3lite.models.rotary import LinearScaling, Rope, divisor_factors, rotary_divisors
from r3lite.models.weights import checkpoint_tensors
from r3lite.protocols.tokenizer import Tokenizer

REMEDY = "Use --form folder."
ENDINGS = {"lora_A": "lora_a", "lora_B": "lora_b"}  # PEFT's names of an adapter's matrices -> GGUF's
# The types of matrices in GGUF, by the setting --weights.
TYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16", "q8_0": "Q8_0"}


def write(model: CausalLM, folder: Path, tokenizer: Tokenizer, path: Path, weights: str, name: str) -> None:
    """Writes a model without adapters, with the tokenizer of `folder`, to the file `path`, whole or not at all.

    Special tokens and chat template are those of the training, as `tokenizer` has them.
    """
    with _writer(path, model) as writer:
        _add_sizes(writer, model, name)
        _add_tokenizer(writer, folder, tokenizer, model.config.vocab_size)
        if scaling := model.config.rope_scaling:
            factors = divisor_factors(rotary_divisors(model.config.head_dim, model.config.rope_theta), scaling)
            writer.add_tensor(ROPE, factors.numpy())
        _add_tensors(writer, model, checkpoint_tensors(model), weights)


def write_adapter(model: CausalLM, adapter: str, path: Path, weights: str, name: str) -> None:
    """Writes one adapter of a model, with the keys and names of llama.cpp's convert_lora_to_gguf.

    llama.cpp multiplies by alpha / r. The file's alpha is chosen so that alpha / r is the adapter's scale, also for
    rank-stabilized LoRA, which divides its alpha by the root of r.
    """
    config = lora.switch_of(model).configs[adapter]
    with _writer(path, model) as writer:
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, config.scale * config.r)
        writer.add_name(name)
        _add_tensors(writer, model, lora.adapter_parameters(model, adapter), weights)


def _name(path: str, architecture: str) -> str:
    """Returns GGUF's name of a tensor of a checkpoint, or of a parameter of an adapter."""
    if "lora_" not in path:
        return gguf_name(path, architecture)
    linear, matrix, _ = path.removeprefix("base_model.model.").rsplit(".", 2)
    return f"{gguf_name(linear, architecture)}.weight.{ENDINGS[matrix]}"


def _architecture(config: ModelConfig) -> str:
    """Returns llama.cpp's name of a model's network; raises R3LiteError if r3lite writes no GGUF files of it."""
    if config.layer is Lfm2Layer and config.rope_scaling is None:
        return "lfm2"
    if config.layer is gemma.GemmaLayer and _is_gemma3(config):
        return GEMMA3
    if config.layer is Qwen35Layer and qwen3_5.is_writable(config):
        return QWEN35
    has_windows = any(kind.window for kind in config.layer_kinds)
    if config.layer or has_windows or (config.layer_kinds and not _is_smollm3(config)):
        raise R3LiteError(
            "r3lite writes GGUF files of qwen2, qwen3, llama, mistral, granite, smollm3 without windows, of lfm2, and "
            "of gemma3 and qwen3_5 with layers as in the published models, not of this model",
            REMEDY,
            code="gguf-family",
        )
    if config.layer_kinds:
        return "smollm3"
    if config.attention_scale is not None:
        return "granite"
    if config.qkv_bias:
        return "qwen2"
    if config.qk_norm:
        return "qwen3"
    return "llama"


def _is_smollm3(config: ModelConfig) -> bool:
    """Returns whether every fourth layer, and no other, has no positions, as llama.cpp takes for granted."""
    for layer, kind in enumerate(config.layer_kinds):
        is_fourth = (layer + 1) % NO_ROPE_INTERVAL == 0
        has_no_positions = kind.rope is None
        if has_no_positions != is_fourth:
            return False
    return True


def _is_gemma3(config: ModelConfig) -> bool:
    """Returns whether windows, positions and attention scale are those that llama.cpp takes for granted."""
    width = gemma.attention_width(
        config.num_hidden_layers,
        head_dim=config.head_dim,
        hidden_per_head=config.hidden_size / config.num_attention_heads,
    )
    if config.attention_scale != width**-0.5:
        return False
    for layer, kind in enumerate(config.layer_kinds):
        has_window = (layer + 1) % gemma.PATTERN != 0
        if has_window != bool(kind.window):
            return False
        if has_window and kind.rope != Rope(gemma.LOCAL_THETA):
            return False
    return True


def _heads(model: CausalLM, name: str) -> int:
    """Returns the number of heads within which a file reorders the rows of a tensor; 0: it does not reorder them."""
    if "lora_A" in name:  # unlike the rows of B, those of A are not outputs of the layer
        return 0
    config = model.config
    return heads_of(name, _architecture(config), config.num_attention_heads, config.num_key_value_heads)


@contextlib.contextmanager
def _writer(path: Path, model: CausalLM) -> Iterator[gguf.GGUFWriter]:
    """Yields a writer, to which a GGUF file's keys and tensors are added; the end of the block writes the file."""
    export_folder = path.parent.absolute()  # it is made last, so that a failure leaves nothing
    temporary = export_folder.with_name(f".{export_folder.name}.{os.getpid()}{PART}")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(temporary, _architecture(model.config))
    try:
        yield writer
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        path.parent.mkdir(exist_ok=True)
        move(temporary, path)
    except OSError as error:  # NumPy's, of a full disk, has neither number nor path
        raise OSError(error.errno or errno.EIO, str(error), str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def _add_sizes(writer, model: CausalLM, name: str) -> None:
    config = model.config
    writer.add_name(name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(_kv_heads(config))
    rope = _rope(config)
    writer.add_rope_freq_base(rope.theta)
    if isinstance(rope.scaling, LinearScaling):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope.scaling.factor)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    architecture = _architecture(config)
    if architecture != "qwen2":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if architecture == "lfm2" or architecture in LIKE_LLAMA:
        writer.add_vocab_size(config.vocab_size)
    if architecture == "lfm2":
        taps = max(kind.taps for kind in config.layer_kinds) or TAPS
        writer.add_uint32(f"{architecture}.shortconv.l_cache", taps)
    if architecture == QWEN35 or architecture in LIKE_LLAMA:
        writer.add_rope_dimension_count(rope.dims or config.head_dim)
    if architecture == QWEN35:
        for key, size in qwen3_5.sizes(config).items():
            writer.add_uint32(f"{architecture}.{key}", size)
        writer.add_rope_dimension_sections(qwen3_5.ROTARY_SECTIONS)
    if architecture == GEMMA3:
        writer.add_sliding_window(config.kind(0).window)
    if architecture == "granite":
        # The residual multiplier is contained in the embedding multiplier and in the norms' eps: see models/granite.py.
        writer.add_residual_scale(1.0)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_attention_scale(config.attention_scale)
        writer.add_logit_scale(config.logits_scaling)


def _rope(config: ModelConfig) -> Rope:
    """Returns the rotary positions of layers without a window."""
    for kind in config.layer_kinds:
        if kind.rope and not kind.window:
            return kind.rope
    return Rope(config.rope_theta, config.rope_scaling)


def _kv_heads(config: ModelConfig) -> int | list[int]:
    """Returns the number of key/value heads; for LFM2, whose convolutions have none, the number of each layer."""
    if config.layer is not Lfm2Layer:
        return config.num_key_value_heads
    heads = []
    for kind in config.layer_kinds:
        if kind.taps:
            heads.append(0)
        else:
            heads.append(config.num_key_value_heads)
    return heads


def _add_tensors(writer, model: CausalLM, tensors: dict[str, Tensor], weights: str) -> None:
    architecture = _architecture(model.config)
    for name, tensor in tqdm(tensors.items(), desc="converting", unit="tensor", disable=None):
        type_name = "F32"
        if tensor.dim() == 2:
            type_name = TYPES[weights]
        kind = gguf.GGMLQuantizationType[type_name]
        tensor = tensor.detach().float()
        if architecture == QWEN35:
            tensor = qwen3_5.to_file(name, tensor, model.config)
        numbers = tensor.numpy()
        if tensor.dim() == 3:  # a convolution of each channel by itself: [C, 1, taps]
            numbers = numbers.squeeze(1)
        heads = _heads(model, name)
        if heads:
            numbers = numbers[np.argsort(row_order(len(numbers), heads))]  # argsort inverts the order
        shift = shift_of(name, architecture)
        if shift:
            numbers = numbers + np.float32(shift)
        writer.add_tensor(_name(name, architecture), gguf.quants.quantize(numbers, kind), raw_dtype=kind)


def _add_tokenizer(writer, folder: Path, tokenizer: Tokenizer, rows: int) -> None:
    """Adds the BPE of `tokenizer.json`. Ids below `rows` (the embedding's rows) that have no token become padding."""
    record = read_record(folder / "tokenizer.json", REMEDY)
    model = record.record("model")
    split = split_of(record)
    is_sentencepiece = gguf_tokenizer.is_sentencepiece(record)
    if model.text("type") != "BPE" or not (split or is_sentencepiece):
        problem = "the tokenizer splits text in an unsupported way"
        if model.flag("byte_fallback", False) or model.text("type") == "Unigram":
            problem = "the tokenizer is SentencePiece, but not as Gemma's"
        raise record.error(
            f"{problem}; supported are Gemma's and byte-level BPE that llama.cpp calls {', '.join(SPLITS)}"
        )
    if tokenizer.size > rows:
        raise record.error(f"the tokenizer has token ids up to {tokenizer.size - 1}, but the embedding has {rows} rows")
    tokens, types = _tokens(record, rows, is_sentencepiece)
    merges = []
    for merge in model.items("merges"):
        if isinstance(merge, str):
            merge = merge.split(" ")
        merges.append(tuple(merge))
    if is_sentencepiece:
        writer.add_tokenizer_model(SENTENCEPIECE)
        writer.add_tokenizer_pre(SENTENCEPIECE_SPLIT)
        writer.add_token_scores(_scores(record, merges, tokens=tokens, types=types))
        writer.add_add_space_prefix(False)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(split)
        writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    ids = {name: tokens.index(token) for name, token in tokenizer.special_tokens.items() if token in tokens}
    for name, id in ids.items():
        getattr(writer, f"add_{name}_id")(id)
    begins_with_bos = "bos_token" in ids and tokenizer.bos == tokens[ids["bos_token"]]
    writer.add_add_bos_token(begins_with_bos)
    writer.add_chat_template(trained_template(tokenizer))


def _tokens(record: Record, rows: int, is_sentencepiece: bool) -> tuple[list[str], list[int]]:
    """Returns the tokens of a `tokenizer.json`, and their types."""
    tokens = [f"[PAD{i}]" for i in range(rows)]
    types = [gguf.TokenType.UNUSED] * rows
    for token, id in record.record("model").record("vocab").values.items():
        tokens[id] = token
        types[id] = gguf.TokenType.NORMAL
    if is_sentencepiece:
        for token in BYTES:
            types[tokens.index(token)] = gguf.TokenType.BYTE
    for added in record.records("added_tokens"):
        token = added.text("content", blank=True)
        is_special = added.flag("special", False)
        if is_sentencepiece and SPACE in token and not is_special:
            continue  # the merges make this token from spaces; it is not looked for in the text as a whole
        id = added.whole("id")
        tokens[id] = token
        types[id] = gguf.TokenType.USER_DEFINED
        if is_special:
            types[id] = gguf.TokenType.CONTROL
    return tokens, types


def _scores(
    record: Record,
    merges: Sequence[tuple[str, str]],
    tokens: Sequence[str],
    types: Sequence[int],
) -> list[float]:
    """Returns scores with which llama.cpp merges tokens as a `tokenizer.json` does.

    llama.cpp merges any two tokens that together are a token, the result with the best score first. Raises R3LiteError
    if the `merges` of `tokenizer.json` lack such a pair, or if the pairs of one result do not follow each other there.
    """
    ranks: dict[str, int] = {}
    previous = None
    for left, right in merges:
        result = left + right
        if result != previous and result in ranks:
            raise record.error(f"the merges that give {result!r} are apart, which scores of tokens cannot say")
        ranks.setdefault(result, len(ranks))
        previous = result
    scores = [-float(ranks.get(token, len(ranks))) for token in tokens]
    present = set(tokens)
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind == gguf.TokenType.NORMAL}
    expected = set()
    for left, right in merges:
        if left + right in normal and left in present and right in present:
            expected.add((left, right))
    missing = set(gguf_tokenizer.merges_by_score(tokens, types, scores)) - expected
    if missing:
        raise record.error(f"the merges lack {min(missing)}, which llama.cpp would merge")
    return scores


@torch.no_grad()
def fill(model: CausalLM, header: Header, adapter: str | None = None) -> None:
    """Copies the weights of a file into a model of the same sizes or, if `adapter` is named, into this adapter."""
    tensors = checkpoint_tensors(model)
    if adapter:
        tensors = lora.adapter_parameters(model, adapter)
    architecture = _architecture(model.config)
    for name, tensor in tensors.items():
        stored = replace(
            header.tensors[_name(name, architecture)],
            heads=_heads(model, name),
            shift=shift_of(name, architecture),
        )
        numbers = stored[:].view_as(tensor)
        if architecture == QWEN35:
            numbers = qwen3_5.from_file(name, numbers, model.config)
        tensor.copy_(numbers)
