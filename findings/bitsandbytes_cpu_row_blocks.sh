#!/usr/bin/env bash
# bitsandbytes 0.50.2, Python 3.11, a processor with AVX-512: NF4 of some layer widths computes with wrong weights
#
# Valid input: Linear4bit (and Params4bit) on the CPU, which is a supported device, with the defaults of NF4 and widths of
# real layers: 4,304 inputs are those of the second product of the MLP in SigLIP so400m, the vision tower of Gemma 3 and
# PaliGemma; 576 inputs are those of SmolLM2-135M, here with blocksize 128, which the documentation allows.
#
# Expected: the error of four bits, 9 % of a normally distributed weight, in the weight as in the layer's output.
#
# Seen: 22 to 25 % in layers whose rows are not made of whole blocks. quantize_4bit divides the weight as one line of
# numbers, so that a block may go on in the next row. dequantize_4bit counts the blocks from the beginning of each row,
# and multiplies many numbers by the scale of the block before theirs. Codes and scales are right: decoded by their
# definition they have the 9 %. The layer's output and its gradient go through dequantize_4bit.
#
# Why it matters: nothing is raised, and a model with weights that are off by a quarter still writes sentences. Look at
# in_features % blocksize before you trust a comparison on a CPU; where it is 0, all is right.
#
# Output:
#   in_features  blocksize   error of the codes   dequantize_4bit   output   gradient
#        4096         64                0.092             0.092    0.092      0.092
#        4304         64                0.092             0.245    0.245      0.246
#         576         64                0.092             0.092    0.091      0.092
#         576        128                0.096             0.220    0.219      0.220
set -euo pipefail
grep -q avx512f /proc/cpuinfo || { echo "this processor has no AVX-512, for which this was seen"; exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet bitsandbytes==0.50.2 torch==2.13.0 numpy==2.4.6 || exit 2
"$work/venv/bin/python" - <<'PY'
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit, Params4bit


def decoded(packed, state):
    """The weight by the definition of NF4: two codes a byte, one scale for each block of the flat weight."""
    codes = torch.stack((packed.flatten() >> 4, packed.flatten() & 15), dim=1).flatten().long()
    scales = state.absmax.repeat_interleave(state.blocksize)
    count = state.shape.numel()
    return (state.code[codes][:count] * scales[:count]).view(state.shape)


def error(value, expected):
    return float((value - expected).norm() / expected.norm())


print("in_features  blocksize   error of the codes   dequantize_4bit   output   gradient")
for in_features, blocksize in ((4096, 64), (4304, 64), (576, 64), (576, 128)):
    torch.manual_seed(0)
    weight = torch.randn(256, in_features) * 0.02
    layer = Linear4bit(in_features, 256, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    layer.weight = Params4bit(
        weight.clone(), requires_grad=False, quant_type="nf4", blocksize=blocksize, compress_statistics=False
    )
    layer = layer.to("cpu")  # quantizes
    packed, state = layer.weight.data, layer.weight.quant_state
    inputs = torch.randn(256, in_features, requires_grad=True)
    upstream = torch.randn(256, 256)
    output = layer(inputs)
    output.backward(upstream)
    errors = {
        "codes": error(decoded(packed, state), weight),
        "dequantized": error(dequantize_4bit(packed, state), weight),
        "output": error(output.detach(), inputs.detach() @ weight.T),
        "gradient": error(inputs.grad, upstream @ weight),
    }
    widths = (20, 17, 8, 10)
    cells = " ".join(f"{value:>{width}.3f}" for value, width in zip(errors.values(), widths))
    print(f"{in_features:>11} {blocksize:>10} {cells}")
    assert errors["codes"] < 0.1
    for name in ("dequantized", "output", "gradient"):
        assert (errors[name] < 0.1) == (in_features % blocksize == 0), (in_features, blocksize, name)
PY
