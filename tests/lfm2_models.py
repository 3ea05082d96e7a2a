"""What makes a small model of the tests one of LFM2: switches of its config, and what its config.json says."""

from r3lite.models.causal_lm import LayerKind
from r3lite.models.lfm2 import Lfm2Layer, Lfm2Trunk
from r3lite.models.rotary import Rope

PATTERN = ["conv", "full_attention", "conv"]


def types_of(layers: int) -> list[str]:
    return (PATTERN * layers)[:layers]


def switches(layers: int) -> dict:
    """Fields of ModelConfig."""
    of_type = {"conv": LayerKind(None, taps=3), "full_attention": LayerKind(Rope(10_000.0))}
    return {
        "num_hidden_layers": layers,
        "layer": Lfm2Layer,
        "trunk": Lfm2Trunk,
        "qk_norm": True,
        "qkv_bias": False,
        "layer_kinds": tuple(of_type[name] for name in types_of(layers)),
    }


def in_file(layers: int) -> dict:
    """Keys of config.json that other families do not have."""
    return {
        "model_type": "lfm2",
        "layer_types": types_of(layers),
        "norm_eps": 1e-6,
        "block_auto_adjust_ff_dim": False,
    }
