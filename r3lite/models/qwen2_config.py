"""The `config.json` of a model folder, read into the sizes of a Qwen2; what `Qwen2` does not compute is refused."""

from pathlib import Path

from r3lite.core.errors import R3LiteError
from r3lite.core.files import read_record
from r3lite.core.records import Record, shown
from r3lite.models import nf4
from r3lite.models.qwen2 import Qwen2Config

# The most of each size: far beyond any published model, and yet a model of it can be laid out without delay.
SIZES = {
    "vocab_size": 1 << 24, "hidden_size": 1 << 17, "intermediate_size": 1 << 20, "num_hidden_layers": 1000,
    "num_attention_heads": 1 << 12, "num_key_value_heads": 1 << 12,
}  # fmt: skip


def read_config(folder: str | Path) -> Qwen2Config:
    """Sizes from a folder's `config.json`, as transformers 4 or 5 spells it; R3LiteError names what is unsupported."""
    record = config_record(folder)
    # transformers 5 has `rope_parameters`; 4 has `rope_theta` and, if it is scaled, `rope_scaling`.
    rope = [record.record("rope_scaling"), record.record("rope_parameters")]
    _check_supported(record, rope)
    theta = next((r for r in rope if "rope_theta" in r), record)
    config = Qwen2Config(
        **{name: record.whole(name, low=1, high=most) for name, most in SIZES.items()},
        rms_norm_eps=record.number("rms_norm_eps", 1e-6, low=0, high=1, above=True),
        rope_theta=theta.number("rope_theta", 10_000.0, low=0, high=1e12, above=True),
        max_position_embeddings=record.whole("max_position_embeddings", 32_768, low=1),
        tie_word_embeddings=record.flag("tie_word_embeddings", False),
    )
    if config.hidden_size % config.num_attention_heads or config.num_attention_heads % config.num_key_value_heads:
        raise record.error(
            f"hidden_size {config.hidden_size}, num_attention_heads {config.num_attention_heads} and "
            f"num_key_value_heads {config.num_key_value_heads} do not divide one another"
        )
    if (found := record.whole("head_dim", config.head_dim)) != config.head_dim:
        raise record.error(f"head_dim is {found}, not hidden_size / num_attention_heads = {config.head_dim}")
    if config.head_dim % 2:  # rotary positions turn pairs of numbers
        raise record.error(f"hidden_size / num_attention_heads is {config.head_dim}, an odd number")
    return config


def config_record(folder: str | Path) -> Record:
    """A folder's `config.json`."""
    return read_record(Path(folder) / "config.json", "Copy config.json from the model's source.")


def _check_supported(record: Record, rope: list[Record]) -> None:
    """Raises R3LiteError if a config asks for something that `Qwen2` does not compute."""
    quantization = record.record("quantization_config").values
    sliding = record.flag("use_sliding_window", False) or "sliding_attention" in record.texts("layer_types", ())
    model_type, activation = record.text("model_type"), record.text("hidden_act", "silu")
    kind = next((k for r in rope if (k := r.text(r.first("rope_type", "type"), "default")) != "default"), None)
    for wrong, what, remedy in (
        (
            model_type != "qwen2",
            f"model_type is {shown(model_type)}",
            "r3lite trains Qwen2 and Qwen2.5 models, whose model_type is qwen2.",
        ),
        (
            quantization not in ({}, nf4.LAYOUT),
            f"quantization_config is {shown(quantization)}",
            "Use the model's unquantized checkpoint, with --quantize nf4 if it is to be in NF4 as by bitsandbytes; of "
            "quantized ones only those are read that r3lite writes.",
        ),
        (
            sliding,
            "sliding-window attention is switched on (use_sliding_window, layer_types)",
            "r3lite computes full attention only; switch it off if your rows are shorter than the window.",
        ),
        (activation != "silu", f"hidden_act is {shown(activation)}", "Only silu is supported."),
        (
            kind is not None,
            f"rope scaling of type {shown(kind)} is set (rope_scaling, rope_parameters)",
            "Remove it to train within the length that the model was made for.",
        ),
    ):
        if wrong:
            raise R3LiteError(f"{record.source.where}: {what}", remedy)


def is_nf4(folder: str | Path) -> bool:
    """Whether a folder was written by `save_nf4`."""
    return bool(config_record(folder).record("quantization_config").values)
