#!/usr/bin/env bash
# prodigyopt 1.1.2, Python 3.11: a group with a learning rate of 0 decays with the learning rate of the others
#
# Valid input: two parameter groups, one with lr=0, and weight_decay=0.1. Prodigy takes no other learning rates than one
# for all and 0: for any other it raises an error that says so. weight_decay is decoupled, as in AdamW, by default.
#
# Expected: the group with lr=0 stays as it is. In AdamW decoupled decay is lr * weight_decay, and at lr=0 nothing
# moves; with decouple=False, nothing moves in Prodigy either.
#
# Seen: the weights of the group shrink towards zero. The decay is multiplied by the step size that was estimated for
# the other groups. There is no warning.
#
# Why it matters: lr=0 is an easy way to freeze a part (a text encoder, the embeddings) without building other
# groups. The part is erased instead, the faster the larger the step size that Prodigy finds, while the log says that
# its learning rate is 0. Set weight_decay=0 in that group, or requires_grad=False, so that it has no gradients.
#
# Output (accuracy on the training set, and norm of the weights of a frozen first layer, before and after 600 steps):
#                                          accuracy  before   after
#   AdamW                                      0.76   4.628   4.628
#   Prodigy                                    0.50   4.628   0.000
#   Prodigy, decouple=False                    0.63   4.628   4.628
#   Prodigy, weight_decay=0 in the group       0.77   4.628   4.628
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet prodigyopt==1.1.2 torch==2.13.0 numpy==2.4.6 || exit 2
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'PY'
import contextlib
import os
import warnings

import torch
from prodigyopt import Prodigy

STEPS = 600
torch.set_num_threads(1)
torch.manual_seed(0)
inputs = torch.randn(256, 16)
labels = (inputs[:, 0] * inputs[:, 1] + 0.3 * torch.randn(256) > 0).float()


def trained(optimizer_class, frozen_decay=None, **settings):
    torch.manual_seed(1)
    features = torch.nn.Linear(16, 64)
    head = torch.nn.Linear(64, 1)
    frozen = {"params": list(features.parameters()), "lr": 0.0}
    if frozen_decay is not None:
        frozen["weight_decay"] = frozen_decay
    with warnings.catch_warnings(record=True) as caught, open(os.devnull, "w") as null:
        warnings.simplefilter("always")
        with contextlib.redirect_stdout(null):  # "Using decoupled weight decay"
            optimizer = optimizer_class([{"params": list(head.parameters())}, frozen], weight_decay=0.1, **settings)
        before = features.weight.detach().clone()
        for _ in range(STEPS):
            logits = head(torch.relu(features(inputs))).squeeze(1)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert not caught, caught
    accuracy = ((logits > 0) == labels.bool()).float().mean().item()
    return accuracy, before.norm().item(), features.weight.detach().norm().item(), torch.equal(before, features.weight)


try:
    other = torch.nn.Parameter(torch.ones(1))
    other.grad = torch.ones(1)
    Prodigy([{"params": [torch.nn.Parameter(torch.ones(1))]}, {"params": [other], "lr": 0.5}], lr=1.0).step()
    raise AssertionError("a learning rate of 0.5 was taken")
except RuntimeError as error:
    assert "only supported for values of 0" in str(error), error

print(f"{'':38} accuracy  before   after")
for name, kept, arguments in (
    ("AdamW", True, {"optimizer_class": torch.optim.AdamW, "lr": 0.01}),
    ("Prodigy", False, {"optimizer_class": Prodigy, "lr": 1.0}),
    ("Prodigy, decouple=False", True, {"optimizer_class": Prodigy, "lr": 1.0, "decouple": False}),
    ("Prodigy, weight_decay=0 in the group", True, {"optimizer_class": Prodigy, "lr": 1.0, "frozen_decay": 0.0}),
):
    accuracy, before, after, same = trained(**arguments)
    print(f"{name:38} {accuracy:8.2f}  {before:6.3f}  {after:6.3f}")
    assert same if kept else after < 0.1 * before, name
PY
