#!/usr/bin/env bash
# pytorch-optimizer 4.1.0, torch 2.13.0, Python 3.11: SRMM with memory_length=None forgets everything at every step
#
# Valid input: a linear regression, started at the weights of least squares, as in fine-tuning; batches of 4 rows. The
# docstring of SRMM: `memory_length` is the memory length of the moving averages, "None for no refreshing"; `beta` is
# the weight of the adaptivity.
#
# Expected: with None the averages of gradients and weights are never started again: step t takes up what is new with a
# weight of (t + 1) ** -beta. So they are written by hand below, and so they are with a memory_length of a million.
#
# Seen: with None the weight is 1 at every step, just as with memory_length=1, the shortest memory that there is. Both
# averages are what came last, `beta` changes nothing, and the result is that of SGD. There is no warning.
#   With a memory, the average of the weights starts at zero, and the first step takes them up with 2 ** -beta only: it
# multiplies all weights by 0.71 (0.54 for a beta of 0.9), even if the learning rate is 0. (By hand the same start is
# taken, to have the same numbers; the code of the authors of SRMM has it as well. No docstring tells of it.)
#
# Why it matters: who compares memories, or takes None for the longest one, measures plain SGD under the name of SRMM.
# And whoever trains a given model with a memory has most of it damaged by the first step: a loss of 1.0 becomes 2.3.
#
# Output (what the first step multiplies the weights by if the learning rate is 0; loss after one step and after 300):
#                                    lr=0, 1 step   1 step   300 steps
#     SGD                                    1.00     1.01       1.076
#     by hand, beta=0.5                      0.71     2.33       1.070
#     by hand, beta=0.9                      0.54     4.25       1.296
#     SRMM, beta=0.5, 1000000                0.71     2.33       1.070
#     SRMM, beta=0.9, 1000000                0.54     4.25       1.296
#     SRMM, beta=0.5, None                   1.00     1.01       1.076
#     SRMM, beta=0.9, None                   1.00     1.01       1.076
#     SRMM, beta=0.9, 1                      1.00     1.01       1.076
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet pytorch-optimizer==4.1.0 torch==2.13.0 numpy==2.4.6 || exit 2
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'PY'
import torch
from pytorch_optimizer import SRMM

SIZE, STEPS, LR = 16, 300, 0.02
torch.set_num_threads(1)
torch.manual_seed(0)
inputs = torch.randn(512, SIZE)
labels = inputs @ torch.randn(SIZE) + torch.randn(512)
trained = torch.linalg.lstsq(inputs, labels[:, None]).solution[:, 0]
batches = torch.randint(512, (STEPS, 4))


def loss(weights, rows=slice(None)):
    return (inputs[rows] @ weights - labels[rows]).square().mean()


class ByHand:
    """Averages of the gradients and of the weights; the share of what is new gets smaller with every step."""

    def __init__(self, parameters, lr, beta):
        (self.weights,), self.lr, self.beta, self.steps = parameters, lr, beta, 0
        self.mean_gradient, self.mean_weights = torch.zeros(SIZE), torch.zeros(SIZE)

    @torch.no_grad()
    def step(self):
        self.steps += 1
        new = (self.steps + 1) ** -self.beta
        self.mean_gradient += new * (self.weights.grad - self.mean_gradient)
        self.mean_weights += new * (self.weights - self.mean_weights)
        self.mean_weights -= self.lr * self.mean_gradient
        self.weights.copy_(self.mean_weights)


def weights_after(steps, optimizer_class, settings, lr=LR):
    weights = torch.nn.Parameter(trained.clone())
    optimizer = optimizer_class([weights], lr=lr, **settings)
    for rows in batches[:steps]:
        weights.grad = None
        loss(weights, rows).backward()
        optimizer.step()
    return weights.detach()


results = {}
print(f"{'':33}lr=0, 1 step   1 step   {STEPS} steps")
for label, optimizer_class, settings in (
    ("SGD", torch.optim.SGD, {}),
    ("by hand, beta=0.5", ByHand, {"beta": 0.5}),
    ("by hand, beta=0.9", ByHand, {"beta": 0.9}),
    ("SRMM, beta=0.5", SRMM, {"beta": 0.5, "memory_length": 10**6}),
    ("SRMM, beta=0.9", SRMM, {"beta": 0.9, "memory_length": 10**6}),
    ("SRMM, beta=0.5", SRMM, {"beta": 0.5, "memory_length": None}),
    ("SRMM, beta=0.9", SRMM, {"beta": 0.9, "memory_length": None}),
    ("SRMM, beta=0.9", SRMM, {"beta": 0.9, "memory_length": 1}),
):
    length = settings.get("memory_length", "")
    key = label, length
    still = weights_after(1, optimizer_class, settings, lr=0.0)
    results[key] = weights_after(STEPS, optimizer_class, settings)
    factor = still.norm() / trained.norm()
    assert torch.allclose(still, factor * trained, atol=1e-6)
    first = loss(weights_after(1, optimizer_class, settings)).item()
    shown = f"{label}{f', {length}' if 'memory_length' in settings else ''}"
    print(f"  {shown:31}{factor:12.2f}{first:9.2f}{loss(results[key]).item():12.3f}")
    if label == "SGD" or length in (None, 1):
        assert factor == 1 and torch.allclose(results[key], results["SGD", ""], atol=1e-5)
    else:
        assert abs(factor - 2 ** -settings["beta"]) < 1e-6
        assert (results[key] - results["SGD", ""]).norm() > 0.05
        assert torch.allclose(results[key], results[label.replace("SRMM", "by hand"), ""], atol=1e-5)
PY
