"""Sizes of published models, so that a run can be planned before its model is downloaded.

The sizes are from the models' `config.json`. What a plan does not depend on is left out: these configs are not for
running a model.
"""

from typing import Any, NamedTuple

from r3lite.models.causal_lm import LayerKind, ModelConfig
from r3lite.models.gated_delta import DeltaHeads
from r3lite.models.gemma import LOCAL_THETA, PATTERN, THETA, GemmaLayer
from r3lite.models.granite import GraniteHybridLayer
from r3lite.models.lfm2 import TAPS, Lfm2Layer, Lfm2Trunk
from r3lite.models.qwen3_5 import HEAD_DIM, INTERVAL, KERNEL, ROTARY_SHARE, Qwen35Layer
from r3lite.models.rotary import Rope

QWEN_TOKENS = 151_665  # ids of the tokenizer of Qwen2.5
# Fields of ModelConfig by which families differ.
LLAMA = {"qkv_bias": False}
QWEN3 = {"head_dim": 128, "qk_norm": True, "qkv_bias": False}
GRANITE = {"qkv_bias": False, "layer": GraniteHybridLayer}
UNTIED = {"tie_word_embeddings": False}


def gemma(layers: int) -> dict[str, Any]:
    """Returns the fields of ModelConfig of a Gemma 3 with so many layers; five of six have a window."""
    local = LayerKind(Rope(LOCAL_THETA), window=512)
    pattern = [local] * (PATTERN - 1) + [LayerKind(Rope(THETA))]
    kinds = tuple(pattern[layer % PATTERN] for layer in range(layers))
    return {"head_dim": 256, "qk_norm": True, "qkv_bias": False, "layer": GemmaLayer, "layer_kinds": kinds}


def qwen35(layers: int) -> dict[str, Any]:
    """Returns the fields of ModelConfig of a small Qwen3.5 with so many layers; every fourth has attention."""
    delta = DeltaHeads(key_heads=16, value_heads=16, key_dim=128, value_dim=128)
    linear = LayerKind(rope=None, taps=KERNEL, delta=delta)
    full = LayerKind(Rope(10_000_000.0, dims=int(HEAD_DIM * ROTARY_SHARE)))
    return {
        "head_dim": HEAD_DIM,
        "qk_norm": True,
        "qkv_bias": False,
        "layer": Qwen35Layer,
        "layer_kinds": (linear, linear, linear, full) * (layers // INTERVAL),
    }


def lfm2() -> dict[str, Any]:
    """Returns the fields of ModelConfig of LFM2; six of its sixteen layers have attention."""
    convolution = LayerKind(rope=None, taps=TAPS)
    kinds = [convolution] * 16
    for layer in (2, 5, 8, 10, 12, 14):
        kinds[layer] = LayerKind(Rope(THETA))
    return {
        "qk_norm": True,
        "qkv_bias": False,
        "layer": Lfm2Layer,
        "trunk": Lfm2Trunk,
        "layer_kinds": tuple(kinds),
    }


# The first fields of ModelConfig, in this order: vocab_size, hidden_size, intermediate_size, num_hidden_layers,
# num_attention_heads, num_key_value_heads.
QWEN25_SIZES = {
    "0.5B": (151_936, 896, 4864, 24, 14, 2),
    "1.5B": (151_936, 1536, 8960, 28, 12, 2),
    "3B": (151_936, 2048, 11_008, 36, 16, 2),
}
QWEN3_SIZES = {
    "0.6B": (151_936, 1024, 3072, 28, 16, 8),
    "1.7B": (151_936, 2048, 6144, 28, 16, 8),
    "4B": (151_936, 2560, 9728, 36, 32, 8),
}
LLAMA32_SIZES = {"1B": (128_256, 2048, 8192, 16, 32, 8), "3B": (128_256, 3072, 8192, 28, 24, 8)}
LFM2_SIZES = {
    "350M": (65_536, 1024, 4608, 16, 16, 8),
    "700M": (65_536, 1536, 6912, 16, 24, 8),
    "1.2B": (65_536, 2048, 8192, 16, 32, 8),
}
SMOLLM2_SIZES = {"135M": (49_152, 576, 1536, 30, 9, 3), "360M": (49_152, 960, 2560, 32, 15, 5)}


class _Family(NamedTuple):
    """Models that differ in their sizes alone."""

    tokenizer_ids: int
    fields: dict[str, Any]  # of ModelConfig, beside the sizes
    max_position_embeddings: int
    sizes: dict[str, tuple[int, ...]]  # by what stands for {} in the name


_FAMILIES = {
    "Qwen/Qwen2.5-{}-Instruct": _Family(QWEN_TOKENS, {}, 32_768, QWEN25_SIZES),
    "Qwen/Qwen2.5-{}B-Instruct": _Family(QWEN_TOKENS, UNTIED, 32_768, {"7": (152_064, 3584, 18_944, 28, 28, 4)}),
    "Qwen/Qwen3-{}": _Family(151_669, QWEN3, 40_960, QWEN3_SIZES),
    "Qwen/Qwen3.5-{}": _Family(248_320, qwen35(24), 262_144, {"0.8B": (248_320, 1024, 3584, 24, 8, 2)}),
    "meta-llama/Llama-3.2-{}-Instruct": _Family(128_256, LLAMA, 131_072, LLAMA32_SIZES),
    "HuggingFaceTB/SmolLM2-{}-Instruct": _Family(49_152, LLAMA, 8192, SMOLLM2_SIZES),
    "TinyLlama/TinyLlama-{}-Chat-v1.0": _Family(
        32_000, LLAMA | UNTIED, 2048, {"1.1B": (32_000, 2048, 5632, 22, 32, 4)},
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-{}": _Family(QWEN_TOKENS, UNTIED, 131_072, {"1.5B": QWEN25_SIZES["1.5B"]}),
    "mistralai/Mistral-{}-Instruct-v0.3": _Family(
        32_768, LLAMA | UNTIED, 32_768, {"7B": (32_768, 4096, 14_336, 32, 32, 8)},
    ),
    "ibm-granite/granite-4.0-{}m": _Family(100_352, GRANITE, 32_768, {"350": (100_352, 1024, 2048, 28, 16, 4)}),
    "ibm-granite/granite-4.0-{}b": _Family(100_352, GRANITE, 131_072, {"1": (100_352, 2048, 4096, 40, 16, 4)}),
    "HuggingFaceTB/SmolLM3-{}": _Family(128_256, LLAMA, 65_536, {"3B": (128_256, 2048, 11_008, 36, 16, 4)}),
    "LiquidAI/LFM2-{}": _Family(65_536, lfm2(), 128_000, LFM2_SIZES),
    "google/gemma-3-{}m-it": _Family(262_144, gemma(18), 32_768, {"270": (262_144, 640, 2048, 18, 4, 1)}),
    "google/gemma-3-{}b-it": _Family(262_144, gemma(26), 32_768, {"1": (262_144, 1152, 6912, 26, 4, 1)}),
}  # fmt: skip


def _instruct_models() -> dict[str, tuple[ModelConfig, int]]:
    """Returns the models of _FAMILIES by name: the config, and the number of the tokenizer's ids."""
    models = {}
    for name, family in _FAMILIES.items():
        for size_name, sizes in family.sizes.items():
            config = ModelConfig(
                *sizes,
                **family.fields,
                max_position_embeddings=family.max_position_embeddings,
            )
            models[name.format(size_name)] = (config, family.tokenizer_ids)
    return models


# By name: the config, and the number of the tokenizer's ids.
INSTRUCT = _instruct_models()
# A base model has the sizes of its instruct model.
_BASE = {name.removesuffix("-Instruct").removesuffix("-it"): model for name, model in INSTRUCT.items()}
KNOWN = INSTRUCT | _BASE
_QWEN25 = [(name, config) for name, (config, _) in KNOWN.items() if name.startswith("Qwen/Qwen2.5")]
QWEN25 = dict(sorted(_QWEN25, key=lambda named: -named[1].hidden_size))  # configs by name, the largest first
