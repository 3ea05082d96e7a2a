#!/usr/bin/env bash
# torchao 0.18.0, torch 2.13.0, Python 3.11: in NF4, one large weight spoils the 255 blocks beside its own
#
# Valid input: to_nf4 of a weight of 256 x 64 normally distributed numbers (standard deviation 0.02), of which one is
# large, with the default block sizes: 64 weights share a scale, and 256 scales are quantized together. Language models
# have single weights that are far larger than the others ("super weights", arXiv 2411.07191).
#
# Expected: the block of the large weight loses its small weights, and the other 255 blocks keep the error of four bits,
# 9 %: outliers are why scales are per block. bitsandbytes, whose double quantization has the same block sizes, does so.
#
# Seen: with a weight 250 times the standard deviation, the weights of all other blocks are off by 28 %; with one 1,000
# times as large by 139 %, and half of them have the wrong sign. The scales of 256 blocks are stored as whole numbers
# from -128 to 127 around their mean, with the largest deviation as 127. One large scale makes the steps coarser than
# the other scales, and because the mean has been subtracted, a small scale can even become negative. bitsandbytes
# stores scales as eight-bit floats.
#
# Why it matters: QLoRA trains on these weights, and nothing is raised. Look at max(abs(w)) / std(w) of each layer before
# you take this format. The largest in SmolLM2-135M is 51, in Gemma 3 270M 40: little is lost there.
#
# Output (of the 255 other blocks):
#   large weight / std   error, torchao   wrong signs   error, bitsandbytes
#                   50            0.102         0.000                 0.093
#                  100            0.126         0.000                 0.093
#                  250            0.278         0.000                 0.094
#                  500            0.636         0.000                 0.097
#                 1000            1.388         0.502                 0.112
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet torchao==0.18.0 bitsandbytes==0.50.2 torch==2.13.0 numpy==2.4.6 || exit 2
"$work/venv/bin/python" - 2>"$work/log" <<'PY' || { cat "$work/log"; exit 1; }
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from torchao.quantization import to_nf4

STD = 0.02


def error(values, expected):
    return float((values - expected).norm() / expected.norm())


torch.manual_seed(0)
ordinary = torch.randn(256, 64) * STD  # 256 blocks: each row is one
print("large weight / std   error, torchao   wrong signs   error, bitsandbytes")
errors = {}
for ratio in (50, 100, 250, 500, 1000):
    weight = ordinary.clone()
    weight[0, 0] = ratio * STD
    others = weight[1:]
    torchao = to_nf4(weight, block_size=64, scaler_block_size=256).get_original_weight()[1:]
    packed, state = quantize_4bit(weight, quant_type="nf4", blocksize=64, compress_statistics=True)
    bitsandbytes = dequantize_4bit(packed, state)[1:]
    wrong_signs = float((torchao * others < 0).float().mean())
    errors[ratio] = error(torchao, others), wrong_signs, error(bitsandbytes, others)
    print(f"{ratio:>18} {errors[ratio][0]:>16.3f} {wrong_signs:>13.3f} {errors[ratio][2]:>21.3f}")
assert errors[50][0] < 0.11 and errors[250][0] > 0.25 and errors[1000][0] > 1
assert errors[500][1] == 0 and errors[1000][1] > 0.4
assert all(of_bitsandbytes < 0.12 for _, _, of_bitsandbytes in errors.values())
PY
