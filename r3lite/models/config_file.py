"""The `config.json` of a model folder: its family, and its sizes; what the network does not compute is refused."""

from dataclasses import dataclass
from pathlib import Path

from r3lite.core.errors import R3LiteError, nearest
from r3lite.core.files import read_record
from r3lite.core.records import Record, shown
from r3lite.models import bitsandbytes_weights, nf4
from r3lite.models.causal_lm import ModelConfig, RopeScaling

# The most of each size: far beyond any published model, and yet a model of it can be laid out without delay.
SIZES = {
    "vocab_size": 1 << 24, "hidden_size": 1 << 17, "intermediate_size": 1 << 20, "num_hidden_layers": 1000,
    "num_attention_heads": 1 << 12, "num_key_value_heads": 1 << 12,
}  # fmt: skip

NF4 = "The only supported quantization is NF4, by bitsandbytes (*-bnb-4bit) or by r3lite."
QUANTIZED = f"{bitsandbytes_weights.REMEDY} {NF4}"
SLIDING = "r3lite supports full attention only; disable it if your rows are shorter than the window."
ROPE = "Only llama3 is supported. Remove it from config.json to train within the original context length."


@dataclass(frozen=True)
class Family:
    """What the models of one `model_type` compute, which their `config.json` need not say."""

    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int = 0  # if config.json has none; 0: hidden_size / num_attention_heads


FAMILIES = {
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True, head_dim=128),
    "llama": Family(),
    "mistral": Family(),
}


def read_config(folder: str | Path) -> ModelConfig:
    """Sizes from a folder's `config.json`, as transformers 4 or 5 spells it; R3LiteError names what is unsupported."""
    record = config_record(folder)
    model_type = record.text("model_type")
    if model_type not in FAMILIES:
        raise R3LiteError(
            f"{record.source.where}: model_type is {shown(model_type)}{nearest(model_type, FAMILIES)}",
            f"Supported types are {', '.join(FAMILIES)}; docs/models.md lists models.",
            code="model-type-unsupported",
        )
    # transformers 5 has `rope_parameters`; 4 has `rope_theta` and, if it is scaled, `rope_scaling`.
    rope = [record.record("rope_scaling"), record.record("rope_parameters")]
    _check_supported(record, model_type, rope)
    sizes = {name: record.whole(name, None, low=1, high=most) for name, most in SIZES.items()}
    sizes["num_key_value_heads"] = sizes["num_key_value_heads"] or sizes["num_attention_heads"]  # Llama 1
    if missing := [name for name, size in sizes.items() if size is None]:
        raise record.wrong(missing[0], "a size")
    family, theta = FAMILIES[model_type], next((r for r in rope if "rope_theta" in r), record)
    config = ModelConfig(
        **sizes,
        rms_norm_eps=record.number("rms_norm_eps", 1e-6, low=0, high=1, above=True),
        rope_theta=theta.number("rope_theta", 10_000.0, low=0, high=1e12, above=True),
        max_position_embeddings=record.whole("max_position_embeddings", 32_768, low=1),
        tie_word_embeddings=record.flag("tie_word_embeddings", False),
        head_dim=record.whole("head_dim", family.head_dim, high=1 << 12),
        rope_scaling=next((_scaling(r) for r in rope if _rope_type(r) == "llama3"), None),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
    )
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads or ("head_dim" not in record and not family.head_dim and config.hidden_size % heads):
        raise record.error(
            f"hidden_size {config.hidden_size}, num_attention_heads {heads} and num_key_value_heads {kv_heads} do not "
            "divide one another"
        )
    if config.head_dim % 2:  # rotary positions turn pairs of numbers
        raise record.error(f"head_dim is {config.head_dim}; it must be even")
    return config


def _rope_type(rope: Record) -> str:
    return rope.text(rope.first("rope_type", "type"), "default")


def _scaling(rope: Record) -> RopeScaling:
    factors = {name: rope.number(name, low=0, high=1e6, above=True) for name in ("low_freq_factor", "high_freq_factor")}
    if factors["low_freq_factor"] >= factors["high_freq_factor"]:
        raise rope.error("low_freq_factor must be less than high_freq_factor")
    original = rope.whole("original_max_position_embeddings", low=1)
    return RopeScaling(rope.number("factor", low=1, high=1e6), **factors, original_max_position_embeddings=original)


def config_record(folder: str | Path) -> Record:
    """A folder's `config.json`."""
    return read_record(Path(folder) / "config.json", "Copy config.json from the model's source.")


def _check_supported(record: Record, model_type: str, rope: list[Record]) -> None:
    """Raises R3LiteError if a config asks for something that the network does not compute."""
    quantization = record.record("quantization_config").values
    quantized = None if quantization in ({}, nf4.LAYOUT) else bitsandbytes_weights.unsupported(quantization)
    if quantized and quantization.get("quant_method") == nf4.METHOD:
        quantized = f"quantization_config is {shown(quantization)}"
    sliding = record.flag("use_sliding_window", False) or "sliding_attention" in record.texts("layer_types", ())
    if model_type == "mistral":  # whose window, of all families, needs no switch
        sliding = sliding or "sliding_window" in record
    activation, partial = record.text("hidden_act", "silu"), record.number("partial_rotary_factor", 1)
    kind = next((k for k in map(_rope_type, rope) if k not in ("default", "llama3")), None)
    biased = next((k for k in ("attention_bias", "mlp_bias") if model_type != "qwen2" and record.flag(k, False)), None)
    sliding_what = "sliding-window attention is on (use_sliding_window, sliding_window, layer_types)"
    rope_what = f"rope scaling of type {shown(kind)} is set (rope_scaling, rope_parameters)"
    for wrong, what, remedy in (
        (quantized is not None, quantized, QUANTIZED),
        (sliding, sliding_what, SLIDING),
        (activation != "silu", f"hidden_act is {shown(activation)}", "Only silu is supported."),
        (kind is not None, rope_what, ROPE),
        (partial != 1, f"partial_rotary_factor is {partial:g}", "Only 1 is supported."),
        (record.flag("rope_interleaved", False), "rope_interleaved is true", "Only false is supported."),
        (biased is not None, f"{biased} is true", f"Only false is supported for {model_type}."),
    ):
        if wrong:
            raise R3LiteError(f"{record.source.where}: {what}", remedy, code="model-config-unsupported")


def quant_method(folder: str | Path) -> str | None:
    """Whose NF4 a folder is in: that of `nf4.LAYOUT` or `bitsandbytes_weights.METHOD`; None if it is dense."""
    return config_record(folder).record("quantization_config").text("quant_method", None)


def is_nf4(folder: str | Path) -> bool:
    """Whether a folder is in NF4, or most layers of it."""
    return quant_method(folder) is not None
