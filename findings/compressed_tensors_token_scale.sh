#!/usr/bin/env bash
# compressed-tensors 0.20.1, Python 3.11: for inputs of two dimensions, one scale for each token is one for all tokens
#
# Valid input: a Linear layer whose inputs are quantized to 8 bits with strategy="token" and dynamic=True, as in the
# scheme "W8A8". Its 64 tokens come as texts of some tokens, or as one table of tokens, as an expert of a mixture or
# the head of a reranker may get them. One of the tokens is larger than the others.
#
# Expected: each token has a scale of its own, so that its result is the same in any shape and any company.
#
# Seen: that holds for inputs of three dimensions only. In a table of tokens the largest value of all of them gives the
# one scale, so that the small ones lose their digits, up to all. In an input of four dimensions, the tokens of the last
# two dimensions share a scale. There is no warning.
#
# Why it matters: what a token gets depends on the others of its batch, and the first token of a text is often hundreds
# of times larger than the rest inside a model. The quality that is measured is that of another and much worse scheme.
#
# Output (scales of the layer; mean relative error of the results, without that of the large token; their largest
# relative difference from the results that the same tokens get alone):
#   larger by  shape             scales   error  difference from alone
#           1  (1, 64, 128)          64   0.007                  0.000
#           1  (8, 8, 128)           64   0.007                  0.000
#           1  (64, 128)              1   0.010                  0.014
#           1  (2, 4, 8, 128)         8   0.008                  0.013
#          10  (1, 64, 128)          64   0.007                  0.000
#          10  (8, 8, 128)           64   0.007                  0.000
#          10  (64, 128)              1   0.067                  0.088
#          10  (2, 4, 8, 128)         8   0.015                  0.072
#         100  (1, 64, 128)          64   0.007                  0.000
#         100  (8, 8, 128)           64   0.007                  0.000
#         100  (64, 128)              1   0.663                  0.860
#         100  (2, 4, 8, 128)         8   0.076                  0.673
#        1000  (1, 64, 128)          64   0.007                  0.000
#        1000  (8, 8, 128)           64   0.007                  0.000
#        1000  (64, 128)              1   1.000                  1.000
#        1000  (2, 4, 8, 128)         8   0.118                  1.000
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.24.0 compressed-tensors==0.20.1 \
    || exit 2
OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 "$work/venv/bin/python" - <<'PY'
import warnings

import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

SIZE = 128
TOKENS = 64
LARGE = 5  # The number of the token that is larger than the others.
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
layer = torch.nn.Linear(SIZE, SIZE, bias=False)
weight = layer.weight.detach().clone()
model = torch.nn.Sequential(layer)
arguments = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
scheme = QuantizationScheme(targets=["Linear"], input_activations=arguments)
apply_quantization_config(model, QuantizationConfig(config_groups={"inputs": scheme}), show_progress=False)
small = [token for token in range(TOKENS) if token != LARGE]


def by_hand(inputs):
    """What the layer computes when each token has its own scale."""
    scale = inputs.abs().amax(dim=1, keepdim=True) / 127.5
    return (inputs / scale).round().clamp(-128, 127) * scale @ weight.T


def difference(results, goal):
    return ((results - goal).norm(dim=1) / goal.norm(dim=1))[small]


print("  larger by  shape             scales   error  difference from alone")
drawn = torch.randn(TOKENS, SIZE)
with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for factor in (1, 10, 100, 1000):
        tokens = drawn.clone()
        tokens[LARGE] *= factor
        exact = tokens @ weight.T
        right = by_hand(tokens)
        alone = torch.cat([model(tokens[None, number : number + 1])[0] for number in range(TOKENS)])
        assert difference(alone, right).max() < 1e-9
        for shape in ((1, TOKENS, SIZE), (8, 8, SIZE), (TOKENS, SIZE), (2, 4, 8, SIZE)):
            inputs = tokens.reshape(shape)
            results = model(inputs).reshape(TOKENS, SIZE)
            scales = compute_dynamic_scales_and_zp(inputs, arguments, layer)[0].numel()
            error = difference(results, exact).mean().item()
            change = difference(results, alone).max().item()
            print(f"  {factor:9}  {str(shape):16} {scales:7} {error:7.3f} {change:22.3f}")
            if len(shape) == 3:
                assert scales == TOKENS and error < 0.01 and change < 1e-9, shape
            else:
                assert scales == {2: 1, 4: 8}[len(shape)] and change > 0.003, shape
            if len(shape) == 2 and factor >= 1000:
                assert error == 1, factor
assert not caught, caught
PY
