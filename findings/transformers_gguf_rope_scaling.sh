#!/usr/bin/env bash
# transformers 5.24.0, gguf 0.19.0, torch 2.13.0, Python 3.11: the rope scaling of a GGUF file is ignored in silence
#
# Valid input: a GGUF file whose header has the keys that the GGUF specification gives for scaled rotary positions:
# [arch].rope.scaling.type, .factor and .original_context_length. llama.cpp's converter writes them for Gemma 3 4B to 27B
# (linear, 8), and for a Qwen2 whose config.json has YaRN; llama.cpp applies them.
#
# Expected: `from_pretrained(..., gguf_file=...)` makes the config that the model's own config.json has, with rope_type and
# factor; or it refuses what it cannot read.
#
# Seen: context length, heads, window and base of the rotation are read, but the scaling is not: rope_type is "default"
# for gemma3, qwen2 and llama alike. There is no warning. The context length still promises the scaled one.
#
# Why it matters: the weights are right and short prompts look nearly right, so that nobody notices. Evaluations and
# fine-tunings of a dequantized GGUF then run with other positions than the published model: with factor 8 a token that
# llama.cpp sees 100 places back is 800 places away.
#
# Output:
#   gemma3 linear 8: {'rope_theta': 1000000.0, 'rope_type': 'default'}; 131072 tokens
#   qwen2 yarn 4: {'rope_theta': 1000000.0, 'rope_type': 'default'}; 131072 tokens
#   llama linear 4: {'rope_theta': 1000000.0, 'rope_type': 'default'}; 131072 tokens
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 gguf==0.19.0 || exit 2
cd "$work"
"$work/venv/bin/python" - <<'PY'
import logging
import warnings

import numpy as np
from gguf import GGUFReader, GGUFWriter, RopeScalingType
from transformers import AutoConfig

messages = []


class Recorder(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        messages.append(record.getMessage())


def write(arch: str, scaling: str, factor: float) -> None:
    """Writes the header of a small model, as a converter does, and one tensor."""
    writer = GGUFWriter("model.gguf", arch)
    writer.add_context_length(131072)
    writer.add_block_count(6)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_sliding_window(1024)
    writer.add_rope_freq_base(1e6)
    writer.add_rope_scaling_type(RopeScalingType(scaling))
    writer.add_rope_scaling_factor(factor)
    writer.add_rope_scaling_orig_ctx_len(int(131072 / factor))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["a", "b", "c", "d"])
    writer.add_tensor("token_embd.weight", np.zeros((4, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


warnings.simplefilter("ignore")
logging.getLogger("transformers").addHandler(Recorder())
for arch, scaling, factor in (("gemma3", "linear", 8.0), ("qwen2", "yarn", 4.0), ("llama", "linear", 4.0)):
    write(arch, scaling, factor)
    fields = GGUFReader("model.gguf").fields
    assert fields[f"{arch}.rope.scaling.type"].contents() == scaling
    assert fields[f"{arch}.rope.scaling.factor"].contents() == factor
    config = AutoConfig.from_pretrained(".", gguf_file="model.gguf")
    rope = config.rope_parameters
    rope = dict(sorted(rope.get("full_attention", rope).items()))
    print(f"{arch} {scaling} {factor:g}: {rope}; {config.max_position_embeddings} tokens")
    assert rope == {"rope_theta": 1e6, "rope_type": "default"}
    assert config.max_position_embeddings == 131072
assert not any("rope" in message or "scaling" in message for message in messages), messages
PY
