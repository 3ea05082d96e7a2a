#!/usr/bin/env bash
# optimum-quanto 0.2.7, torch 2.13.0, Python 3.11: a saved model with quantized activations is another one when loaded
#
# Valid input: quantize with weights and activations as qint8, Calibration with its default settings, freeze, and then
# what the readme says for files: save_file of the state dict, quantization_map as JSON, and requantize of a new model.
# The model is four feed-forward blocks of Llama and an output layer. In two of three cases it has one large channel.
#
# Expected: the loaded model computes what the saved one did. Weights and scales are equal, which the script asserts.
#
# Seen: it computes something else, further from the exact model. Where the calibration finds that an output goes to
# something that takes no quantized numbers (SiLU, an addition to the residual stream, the end of the model), it
# switches the quantization of this output off. That is neither in the state dict nor in the map, so after loading all
# outputs are rounded to eight bits, also those for the residual stream and the logits. Switched off by hand, the loaded
# model is the saved one again, to the last bit: the third line of each.
#
# Why it matters: the numbers are measured in the process that has calibrated, and the file is what is used. 1,000
# logits come back as about 150 different numbers. Nothing is raised. Compare outputs after loading, and call
# disable_output_quantization() of the layers whose _forward_hooks were empty before saving.
#
# Output (of 1,000 tokens; error against the model without quantization; different logits per token):
#   large channel   model             error of logits   same best token   different logits
#               1   calibrated                   0.013             0.972                      1000
#               1   loaded                       0.016             0.965                       153
#               1   loaded, repaired             0.013             0.972                      1000
#              30   calibrated                   0.021             0.962                      1000
#              30   loaded                       0.031             0.944                       152
#              30   loaded, repaired             0.021             0.962                      1000
#             300   calibrated                   0.059             0.902                      1000
#             300   loaded                       0.090             0.829                       151
#             300   loaded, repaired             0.059             0.902                      1000
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet optimum-quanto==0.2.7 torch==2.13.0 numpy==2.4.6 || exit 2
"$work/venv/bin/python" - <<'PY'
import json
import tempfile

import torch
from optimum.quanto import Calibration, QTensor, freeze, qint8, quantization_map, quantize, requantize
from safetensors.torch import load_file, save_file


class Block(torch.nn.Module):
    """The feed-forward block of Llama with its residual connection."""

    def __init__(self, width=64, hidden=256):
        super().__init__()
        self.gate = torch.nn.Linear(width, hidden, bias=False)
        self.up = torch.nn.Linear(width, hidden, bias=False)
        self.down = torch.nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


def model(outlier):
    torch.manual_seed(0)
    layers = [*(Block() for _ in range(4)), torch.nn.RMSNorm(64), torch.nn.Linear(64, 1000, bias=False)]
    layers[3].down.weight.data[0] *= outlier
    return torch.nn.Sequential(*layers).eval()


def error(values, expected):
    return float((values - expected).norm() / expected.norm())


torch.manual_seed(1)
calibration, inputs = torch.randn(256, 64), torch.randn(1000, 64)
print("large channel   model             error of logits   same best token   different logits")
with torch.no_grad():
    for outlier in (1, 30, 300):
        exact = model(outlier)(inputs)
        quantized = model(outlier)
        quantize(quantized, weights=qint8, activations=qint8)
        with Calibration():
            for batch in calibration.split(32):
                quantized(batch)
        freeze(quantized)
        with tempfile.TemporaryDirectory() as folder:
            save_file(quantized.state_dict(), f"{folder}/model.safetensors")
            text = json.dumps(quantization_map(quantized))
            loaded = model(outlier)
            requantize(loaded, load_file(f"{folder}/model.safetensors"), json.loads(text))
        loaded.eval()
        before, after = quantized.state_dict(), loaded.state_dict()
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
        values = {}
        for name, each in (("calibrated", quantized), ("loaded", loaded), ("loaded, repaired", loaded)):
            if name == "loaded, repaired":
                for path in json.loads(text):
                    if not quantized.get_submodule(path)._forward_hooks:  # the calibration switched it off
                        loaded.get_submodule(path).disable_output_quantization()
            logits = each(inputs)
            logits = logits.dequantize() if isinstance(logits, QTensor) else logits
            values[name] = logits
            agreement = (logits.argmax(-1) == exact.argmax(-1)).float().mean()
            distinct = sum(len(row.unique()) for row in logits) / len(logits)
            print(f"{outlier:>13}   {name:<16}{error(logits, exact):>18.3f}{agreement:>18.3f}{distinct:>26.0f}")
        assert torch.equal(values["loaded, repaired"], values["calibrated"])
        assert error(values["loaded"], exact) > 1.15 * error(values["calibrated"], exact)
PY
