"""Sizes of published models, so that a run can be planned before its model is downloaded.

From the models' `config.json`; the last number is that of their tokenizer's ids, above which the embedding is padding.
"""

from r3lite.models.causal_lm import ModelConfig, RopeScaling

QWEN_TOKENS, QWEN3_TOKENS = 151_665, 151_669
LLAMA3 = {
    "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "max_position_embeddings": 131_072, "qkv_bias": False,
    "rope_scaling": RopeScaling(32.0, 1.0, 4.0, 8192),
}  # fmt: skip
LLAMA = {"rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "max_position_embeddings": 2048, "qkv_bias": False}
SMOLLM2 = LLAMA | {"rope_theta": 100_000.0, "max_position_embeddings": 8192}
THINKING = {"head_dim": 128, "qk_norm": True, "qkv_bias": False, "max_position_embeddings": 40_960}
UNTIED = {"tie_word_embeddings": False}
# vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads
_FAMILIES = {
    "Qwen/Qwen2.5-{}-Instruct": (
        QWEN_TOKENS, {}, {"0.5B": (151_936, 896, 4864, 24, 14, 2), "1.5B": (151_936, 1536, 8960, 28, 12, 2),
                    "3B": (151_936, 2048, 11_008, 36, 16, 2)},
    ),
    "Qwen/Qwen3-{}": (
        QWEN3_TOKENS, THINKING, {"0.6B": (151_936, 1024, 3072, 28, 16, 8), "1.7B": (151_936, 2048, 6144, 28, 16, 8),
                          "4B": (151_936, 2560, 9728, 36, 32, 8)},
    ),
    "meta-llama/Llama-3.2-{}-Instruct": (
        128_256, LLAMA3, {"1B": (128_256, 2048, 8192, 16, 32, 8), "3B": (128_256, 3072, 8192, 28, 24, 8)},
    ),
    "HuggingFaceTB/SmolLM2-{}-Instruct": (
        49_152, SMOLLM2, {"135M": (49_152, 576, 1536, 30, 9, 3), "360M": (49_152, 960, 2560, 32, 15, 5)},
    ),
    "TinyLlama/TinyLlama-{}-Chat-v1.0": (32_000, LLAMA | UNTIED, {"1.1B": (32_000, 2048, 5632, 22, 32, 4)}),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-{}": (
        QWEN_TOKENS, {"rope_theta": 10_000.0} | UNTIED, {"1.5B": (151_936, 1536, 8960, 28, 12, 2)},
    ),
    "mistralai/Mistral-{}-Instruct-v0.3": (
        32_768, LLAMA | UNTIED | {"rope_theta": 1e6, "max_position_embeddings": 32_768},
        {"7B": (32_768, 4096, 14_336, 32, 32, 8)},
    ),
}  # fmt: skip
INSTRUCT = {
    name.format(size): (ModelConfig(*shape, **switches), tokens)
    for name, (tokens, switches, sizes) in _FAMILIES.items()
    for size, shape in sizes.items()
}
KNOWN = INSTRUCT | {name.removesuffix("-Instruct"): sizes for name, sizes in INSTRUCT.items()}  # a base has its sizes
_QWEN25 = [(name, sizes) for name, (sizes, _) in KNOWN.items() if name.startswith("Qwen/Qwen2.5")]
QWEN25 = dict(sorted(_QWEN25, key=lambda item: -item[1].hidden_size))  # the largest first
