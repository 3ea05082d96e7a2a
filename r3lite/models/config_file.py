"""The `config.json` of a model folder: its family, and its sizes; what the network does not compute is refused."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from r3lite.core.errors import R3LiteError, nearest
from r3lite.core.files import read_record
from r3lite.core.records import Record, shown
from r3lite.models import bitsandbytes_weights, gemma, granite, layer_kinds, lfm2, nf4, qwen3_5
from r3lite.models.causal_lm import ModelConfig
from r3lite.models.layer_kinds import unsupported
from r3lite.models.rotary import RopeScaling
from r3lite.models.text_part import is_whole, text_values

# The upper limit of each size: far beyond any published model, but a model of such a size is still laid out quickly.
SIZES = {
    "vocab_size": 1 << 24, "hidden_size": 1 << 17, "intermediate_size": 1 << 20, "num_hidden_layers": 1000,
    "num_attention_heads": 1 << 12, "num_key_value_heads": 1 << 12,
}  # fmt: skip

NF4 = "The only supported quantization is NF4, by bitsandbytes (*-bnb-4bit) or by r3lite."
QUANTIZED = f"{bitsandbytes_weights.REMEDY} {NF4}"
SLIDING = "Layers of this model_type have no window; disable it if your rows are shorter than the window."
ROPE = "Only llama3 is supported. Remove it from config.json to train within the original context length."


@dataclass(frozen=True)
class Family:
    """The models of one `model_type`: what their `config.json` need not say, and what only theirs says."""

    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int = 0  # if config.json has none; 0: hidden_size / num_attention_heads
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)  # the defaults of sizes that config.json lacks
    activation: tuple[str, str] = ("hidden_act", "silu")  # the key, and the only value that is supported
    rope_types: tuple[str, ...] = ("default", "llama3")
    windows: bool = False  # its layers may have a window
    rotates_all: bool = True  # all numbers of a head are rotated by position, not only a share of them
    # Adds what only this family's config.json has.
    complete: Callable[[Record, ModelConfig], ModelConfig] | None = None


FAMILIES = {
    "qwen2": Family(windows=True, qkv_bias=True, complete=layer_kinds.qwen),
    "qwen3": Family(windows=True, qk_norm=True, head_dim=128, complete=layer_kinds.qwen),
    "llama": Family(),
    "mistral": Family(windows=True, complete=layer_kinds.mistral),
    "granite": Family(complete=granite.granite),
    "granitemoehybrid": Family(complete=granite.granite_hybrid),
    "smollm3": Family(windows=True, rope_theta=2e6, tie_word_embeddings=True, complete=layer_kinds.smollm3),
    "gemma3_text": Family(
        qk_norm=True,
        head_dim=gemma.HEAD_DIM,
        rope_theta=gemma.THETA,
        tie_word_embeddings=True,
        sizes=gemma.SIZES,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        rope_types=("default", "linear"),
        windows=True,
        complete=gemma.gemma3_text,
    ),
    "lfm2": Family(
        qk_norm=True,
        rope_theta=lfm2.THETA,
        tie_word_embeddings=True,
        sizes=lfm2.SIZES,
        complete=lfm2.lfm2,
    ),
    "qwen3_5_text": Family(
        qk_norm=True,
        head_dim=qwen3_5.HEAD_DIM,
        sizes=qwen3_5.SIZES,
        rope_types=("default",),
        rotates_all=False,
        complete=qwen3_5.qwen3_5_text,
    ),
}


def read_config(folder: str | Path) -> ModelConfig:
    """Reads the sizes from a folder's `config.json`, as transformers 4 or 5 spells it.

    Raises R3LiteError naming what is unsupported.
    """
    file_record = _file_record(folder)
    record = _text_part(file_record)
    model_type = record.text("model_type")
    if model_type not in FAMILIES:
        raise R3LiteError(
            f"{record.source.where}: model_type is {shown(model_type)}{nearest(model_type, FAMILIES)}",
            f"Supported types are {', '.join(FAMILIES)}; docs/models.md lists models.",
            code="model-type-unsupported",
        )
    # transformers 5 has `rope_parameters`; 4 has `rope_theta` and, if it is scaled, `rope_scaling`.
    ropes = [record.record("rope_scaling"), record.record("rope_parameters")]
    family = FAMILIES[model_type]
    _check_supported(record, family, ropes)
    sizes = {}
    for name, limit in SIZES.items():
        sizes[name] = record.whole(name, family.sizes.get(name), low=1, high=limit)
    sizes["num_key_value_heads"] = sizes["num_key_value_heads"] or sizes["num_attention_heads"]  # Llama 1
    missing = [name for name, size in sizes.items() if size is None]
    if missing:
        raise record.wrong(missing[0], "a size")
    longest = family.sizes.get("max_position_embeddings", 32_768)
    theta_record = next((rope for rope in ropes if "rope_theta" in rope), record)
    config = ModelConfig(
        **sizes,
        rms_norm_eps=record.number("rms_norm_eps", 1e-6, low=0, high=1, above=True),
        rope_theta=theta_record.number("rope_theta", family.rope_theta, low=0, high=1e12, above=True),
        max_position_embeddings=record.whole("max_position_embeddings", longest, low=1),
        tie_word_embeddings=record.flag("tie_word_embeddings", family.tie_word_embeddings),
        head_dim=record.whole("head_dim", family.head_dim, high=1 << 12),
        rope_scaling=next((_scaling(rope) for rope in ropes if _rope_type(rope) == "llama3"), None),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
    )
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads
    splits_hidden_size = "head_dim" not in record and not family.head_dim
    if heads % kv_heads or (splits_hidden_size and config.hidden_size % heads):
        raise record.error(
            f"hidden_size {config.hidden_size}, num_attention_heads {heads} and num_key_value_heads {kv_heads} do not "
            "divide one another"
        )
    if config.head_dim % 2:  # rotary positions turn pairs of numbers
        raise record.error(f"head_dim is {config.head_dim}; it must be even")
    config = replace(config, is_text_part=is_whole(file_record.values))
    return family.complete(record, config) if family.complete else config


def _rope_type(rope: Record) -> str:
    return rope.text(rope.first("rope_type", "type"), "default")


def _scaling(rope: Record) -> RopeScaling:
    low_freq_factor = rope.number("low_freq_factor", low=0, high=1e6, above=True)
    high_freq_factor = rope.number("high_freq_factor", low=0, high=1e6, above=True)
    if low_freq_factor >= high_freq_factor:
        raise rope.error("low_freq_factor must be less than high_freq_factor")
    original_length = rope.whole("original_max_position_embeddings", low=1)
    return RopeScaling(
        factor=rope.number("factor", low=1, high=1e6),
        low_freq_factor=low_freq_factor,
        high_freq_factor=high_freq_factor,
        original_max_position_embeddings=original_length,
    )


def config_record(folder: str | Path) -> Record:
    """Reads a folder's `config.json`; if the model also sees images, returns the part about its text model."""
    return _text_part(_file_record(folder))


def _text_part(record: Record) -> Record:
    return Record(text_values(record.values), record.source)


def _file_record(folder: str | Path) -> Record:
    return read_record(Path(folder) / "config.json", "Copy config.json from the model's source.")


def _check_supported(
    record: Record,
    family: Family,
    ropes: list[Record],
) -> None:
    """Raises R3LiteError if a config asks for something that the network does not compute."""
    quantization_fault = _quantization_fault(record.record("quantization_config").values)
    sliding = record.flag("use_sliding_window", False) or layer_kinds.SLIDING in record.texts("layer_types", ())
    activation_key, supported = family.activation
    activation = record.text(activation_key, supported)
    shares = [source.number("partial_rotary_factor", 1) for source in (record, *ropes)]
    rotary_share = next((share for share in shares if share != 1), 1)
    rope_type = next((text for text in map(_rope_type, ropes) if text not in family.rope_types), None)
    bias = None
    if not family.qkv_bias:
        bias = next((key for key in ("attention_bias", "mlp_bias") if record.flag(key, False)), None)
    if quantization_fault:
        raise unsupported(record, quantization_fault, QUANTIZED)
    if sliding and not family.windows:
        fault = "sliding-window attention is on (use_sliding_window, sliding_window, layer_types)"
        raise unsupported(record, fault, SLIDING)
    if activation != supported:
        raise unsupported(record, f"{activation_key} is {shown(activation)}", f"Only {supported} is supported.")
    if rope_type is not None:
        fault = f"rope scaling of type {shown(rope_type)} is set (rope_scaling, rope_parameters)"
        raise unsupported(record, fault, ROPE)
    if rotary_share != 1 and family.rotates_all:
        raise unsupported(record, f"partial_rotary_factor is {rotary_share:g}", "Only 1 is supported.")
    if record.flag("rope_interleaved", False):
        raise unsupported(record, "rope_interleaved is true", "Only false is supported.")
    if bias:
        raise unsupported(record, f"{bias} is true", f"Only false is supported for {record.text('model_type')}.")


def _quantization_fault(quantization: dict[str, Any]) -> str | None:
    """Returns a value of a `quantization_config` that r3lite does not read; None if it reads all of it."""
    if quantization in ({}, nf4.LAYOUT):
        return None
    fault = bitsandbytes_weights.unsupported(quantization)
    if fault and quantization.get("quant_method") == nf4.METHOD:
        return f"quantization_config is {shown(quantization)}"
    return fault


def quant_method(folder: str | Path) -> str | None:
    """Returns which kind of NF4 a folder is in: `nf4.METHOD` or `bitsandbytes_weights.METHOD`; None if it is dense."""
    return config_record(folder).record("quantization_config").text("quant_method", None)


def is_nf4(folder: str | Path) -> bool:
    """Returns True if a folder is in NF4, or most layers of it."""
    return quant_method(folder) is not None
