"""Which models of Qwen3.5 can be GGUF files; the files themselves are tested in tests/models/test_gguf.py."""

import pytest

from r3lite.exporting.qwen3_5 import attention_interval, is_writable
from r3lite.models.causal_lm import LayerKind, ModelConfig
from r3lite.models.gated_delta import DeltaHeads
from r3lite.models.rotary import Rope


def config(layers: str, value_dim: int = 16) -> ModelConfig:
    """`layers`: D with the gated delta rule, A with attention."""
    delta = LayerKind(rope=None, taps=4, delta=DeltaHeads(key_heads=2, value_heads=4, key_dim=16, value_dim=value_dim))
    attention = LayerKind(Rope(10_000.0, dims=4))
    return ModelConfig(
        vocab_size=10,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=len(layers),
        num_attention_heads=2,
        num_key_value_heads=1,
        layer_kinds=tuple(delta if layer == "D" else attention for layer in layers),
    )


@pytest.mark.parametrize(
    ("layers", "interval"),
    [
        ("DDDADDDA", 4),
        ("DADAD", 2),
        ("DDDAD", 4),
        ("DDA", 3),
        ("DAADA", None),
        ("DADDA", None),
        ("ADDA", None),
        ("AA", None),
        ("DD", None),
    ],
)
def test_every_nth_layer_has_attention(layers, interval):
    """llama.cpp reads n only. A model whose layers are all of one kind is refused, too."""
    assert attention_interval(config(layers)) == interval
    assert is_writable(config(layers)) == (interval is not None)


def test_values_are_as_long_as_keys():
    """llama.cpp has one size of both."""
    assert not is_writable(config("DDDA", value_dim=8))
