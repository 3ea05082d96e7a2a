#!/usr/bin/env bash
# peft 0.21.2, Python 3.11: LoHa on convolutions trains two of its six matrices with a wrong gradient
#
# Valid input: LoHaConfig(use_effective_conv2d=True) on a convolution with a kernel larger than 1, here a Conv1d. Each
# half of the Hadamard product is then a core t and two matrices, as in Proposition 3 of the FedPara paper.
#
# Expected: the gradients of the forward pass, that is of (t1, w1_a, w1_b) times (t2, w2_a, w2_b), elementwise.
#
# Seen: those of w1_a and w2_a point somewhere else. The backward pass is written by hand, and for w1_a it contracts the
# error with t2 and w2_b instead of t1 and w1_b, for w2_a the other way round. The other four are right. There is no
# warning. LyCORIS, where the code comes from, has it right in 4.1.3.
#
# Why it matters: the loss falls, only not as far, and looks as if the rank was too small. The matrices are right in
# number and shape, so nothing hints at it. Here the change to learn is one that the adapter can represent, and with the
# gradients of autograd it learns nearly all of it.
#
# Output (cosine of each gradient with that of autograd; loss of a convolution that is to learn another one of the same
# kind, before and after 300 steps of Adam):
#   hada_t1      1.00
#   hada_w1_a   -0.12
#   hada_w1_b    1.00
#   hada_t2      1.00
#   hada_w2_a   -0.44
#   hada_w2_b    1.00
#                   before   after
#   as released      0.330   0.036
#   with autograd    0.330   0.002
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet peft==0.21.2 transformers==5.24.0 accelerate==1.15.0 torch==2.13.0 numpy==2.4.6 \
    || exit 2
OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 "$work/venv/bin/python" -W ignore - <<'PY'
import warnings

import torch
from peft import LoHaConfig, get_peft_model
from peft.tuners.loha import layer as loha

CHANNELS = 8
RANK = 4
STEPS = 300
torch.set_num_threads(1)


def by_autograd(t1, w1a, w1b, t2, w2a, w2b, scale):
    """The weights that the released function gives, but with the gradients of autograd."""
    first = torch.einsum("ijkl,jr,ip->prkl", t1, w1b, w1a)
    second = torch.einsum("ijkl,jr,ip->prkl", t2, w2b, w2a)
    return first * second * scale


released = loha.make_weight_cp
torch.manual_seed(0)
weight = torch.nn.Conv1d(CHANNELS, CHANNELS, 3, bias=False).weight.detach()
inputs = torch.randn(64, CHANNELS, 12)


def adapted(init_weights, seed):
    torch.manual_seed(seed)
    base = torch.nn.Sequential(torch.nn.Conv1d(CHANNELS, CHANNELS, 3, bias=False))
    base[0].weight.data = weight.clone()
    config = LoHaConfig(
        r=RANK, alpha=RANK, target_modules=["0"], use_effective_conv2d=True, init_weights=init_weights
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = get_peft_model(base, config)
    assert not any("LoHa" in str(w.message) or "effective" in str(w.message) for w in caught), caught
    return model


with torch.no_grad():
    # What is to be learned is within reach: the change is that of another such adapter, only larger.
    teacher = adapted(False, 5)
    teacher_layer = teacher.base_model.model[0]
    change = teacher_layer.get_delta_weight("default")
    change *= weight.norm() / change.norm()
    outputs = torch.nn.functional.conv1d(inputs, weight + change)


def loss(model):
    return (model(inputs) - outputs).square().mean()


def gradients(function):
    loha.make_weight_cp = function
    model = adapted(False, 1)
    loss(model).backward()
    return {n.split(".")[-2]: p.grad.flatten() for n, p in model.named_parameters() if p.requires_grad}


def trained(function):
    loha.make_weight_cp = function
    model = adapted(True, 2)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for _ in range(STEPS):
        value = loss(model)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses[0], losses[-1]


own, right = gradients(released), gradients(by_autograd)
for name in ("hada_t1", "hada_w1_a", "hada_w1_b", "hada_t2", "hada_w2_a", "hada_w2_b"):
    cosine = torch.cosine_similarity(own[name], right[name], dim=0).item()
    print(f"{name:10} {cosine:6.2f}")
    if name in ("hada_w1_a", "hada_w2_a"):
        assert abs(cosine) < 0.7, name
    else:
        assert torch.allclose(own[name], right[name], rtol=1e-3, atol=1e-6), name
print(f"{'':15} before   after")
ends = []
for name, function in (("as released", released), ("with autograd", by_autograd)):
    first, last = trained(function)
    ends.append(last)
    print(f"{name:15} {first:6.3f}  {last:6.3f}")
assert ends[1] < 0.5 * ends[0], ends
PY
