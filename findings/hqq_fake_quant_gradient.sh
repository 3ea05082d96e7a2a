#!/usr/bin/env bash
# hqq 0.2.8.post1, Python 3.11: LoRA with fake quantization does not learn
#
# Valid input: `HQQLinearLoRAWithFakeQuant` ("lora_with_fakequant" in `PeftUtils.add_lora`) over a linear layer in 8 bit,
# with fake quantization to 4 bit. Adam trains it to give the outputs of the layer's weight plus a change of rank 4.
#
# Expected: the loss falls, as it does with plain LoRA, down to what 4 bit cost. Rounding has no derivative, so training
# with fake quantization takes that of the weight before it (the straight-through estimator).
#
# Seen: the loss hardly changes. The rounded weight is differentiated as it stands: rounding passes nothing on, and what
# is left is the gradient of scale and zero, that is of the least and the greatest weight of each group. Its direction has
# nothing to do with the right one. With a straight-through gradient, added here in one line, it learns.
#
# Why it matters: nothing is raised, gradients are neither zero nor nan, and the loss of a model that was good before
# looks like that of a run that has converged. `optimize=True`, the default, makes it no better.
#
# Output (loss before and after 300 steps; cosine of the first gradient of B with that of plain LoRA):
#   plain LoRA                     0.593 0.000
#   fake quantization              0.595 0.589  cosine 0.08
#   fake quantization, optimized   0.596 0.628  cosine 0.07
#   straight-through               0.595 0.009  cosine 1.00
#   straight-through, optimized    0.596 0.007  cosine 1.00
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet 'torch==2.13.0' numpy==2.4.6 tqdm==4.67.1 termcolor==3.1.0 setuptools wheel || exit 2
# Without its dependencies: transformers and accelerate are only needed for whole models.
DISABLE_CUDA=1 "$work/venv/bin/pip" install --quiet --no-deps --no-build-isolation hqq==0.2.8.post1 || exit 2
"$work/venv/bin/python" -W ignore - <<'PY'
import torch
from hqq.core.peft import HQQLinearLoRA, HQQLinearLoRAWithFakeQuant
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

SIZE = 64
STEPS = 300
torch.set_num_threads(1)


class StraightThrough(HQQLinearLoRAWithFakeQuant):
    def fake_quant(self, weight):
        return weight + (super().fake_quant(weight) - weight).detach()


torch.manual_seed(0)
weight = torch.nn.Linear(SIZE, SIZE, bias=False).weight.detach()
target = weight + 0.05 * torch.randn(SIZE, 4) @ torch.randn(4, SIZE)
inputs = torch.randn(512, SIZE)
outputs = inputs @ target.T


def train(layer_class, optimize):
    """Returns the first and the last loss, and the first gradient of B."""
    torch.manual_seed(1)
    linear = torch.nn.Linear(SIZE, SIZE, bias=False)
    linear.weight.data = weight.clone()
    config = BaseQuantizeConfig(nbits=8, group_size=SIZE, axis=1)
    quantized = HQQLinear(linear, config, compute_dtype=torch.float32, device="cpu")
    fake = {"nbits": 4, "group_size": SIZE, "axis": 1, "optimize": optimize, "device": "cpu"}
    layer = layer_class(quantized, {"lora_alpha": 8, "r": 8, "train_dtype": torch.float32, "quant_param": fake})
    optimizer = torch.optim.Adam([layer.lora_A, layer.lora_B], lr=3e-3)
    for step in range(STEPS):
        loss = (layer(inputs) - outputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            first = loss.item()
            gradient = layer.lora_B.grad.flatten().clone()
        optimizer.step()
    return first, loss.item(), gradient


first, last, right = train(HQQLinearLoRA, False)
print(f"{'plain LoRA':29}  {first:.3f} {last:.3f}")
assert last < 0.01 * first
for name, layer_class, learns in (
    ("fake quantization", HQQLinearLoRAWithFakeQuant, False),
    ("straight-through", StraightThrough, True),
):
    for optimize in (False, True):
        first, last, gradient = train(layer_class, optimize)
        cosine = torch.cosine_similarity(gradient, right, dim=0).item()
        ending = ", optimized" if optimize else ""
        print(f"{name + ending:29}  {first:.3f} {last:.3f}  cosine {cosine:.2f}")
        assert (last < 0.05 * first) == learns and (last > 0.9 * first) == (not learns)
PY
