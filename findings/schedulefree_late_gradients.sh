#!/usr/bin/env bash
# schedulefree 1.4.1, Python 3.11: what is frozen at first is then trained in steps that are up to 32 times too long
#
# Valid input: an optimizer for the whole model, with the body frozen (requires_grad=False) while a new head is trained,
# and then trained as well. `train` and `eval` are called as in the README; lr and betas are the same for all.
#
# Expected: a weight that had no gradient so far starts as any other. In Adam, and in torch.optim.AdamW, the correction
# of the mean of squares goes by the gradients that this very mean has taken up, so that the first step is as long as
# the learning rate. The average x, with which the model is to be used, starts with the weight as well.
#
# Seen: AdamWScheduleFree counts steps for a group, and goes on counting while a weight has no gradient. After 10000
# steps nothing is left of the correction: the first step of z is 1 / sqrt(1 - beta2), 31.6 learning rates long, and
# after 100 steps z is 6 times as far as it should be. (RAdamScheduleFree has the same count.) The average gives each
# new z a weight of 1 / 10001, in SGDScheduleFree as well, so that x stays where it was: after 100 steps it has gone
# less than a tenth of the way, and without the long steps a hundredth. A group of its own, made at the start, does not
# help: its steps are counted, too. There is no warning.
#
# Why it matters: the body is jolted while it is trained, and the model that is saved and measured is for long the one
# that it was: it looks as if unfreezing gave little. Add the body with `add_param_group` when it is thawed, and call
# `train` again (a new group is not in that mode, so that `eval` leaves it out), or take a new optimizer.
#
# Output (way of a weight whose gradient is always 1, in learning rates, after 1, 10 and 100 of them; for AdamW z and x
# are the weight itself. Loss of a small network with x, at the end of 4000 steps for its head, and of more for all):
#   way of a weight                           z: 1      10     100        x: 1      10     100
#     AdamW, from the start                    1.0    10.0   100.0       1.000  10.000  99.951
#     AdamW, frozen first                      1.0    10.0   100.0       1.000  10.000  99.951
#     AdamWScheduleFree, from the start        1.0    10.0   100.0       1.000   5.500  50.500
#     AdamWScheduleFree, frozen first         31.6   158.9   593.0       0.003   0.104   3.797
#     SGDScheduleFree, from the start          1.0    10.0   100.0       1.000   5.500  50.500
#     SGDScheduleFree, frozen first            1.0    10.0   100.0       0.000   0.005   0.500
#   loss of a network                       before   100 steps  1000 steps
#     AdamW, frozen first                   0.0477      0.0410      0.0202
#     AdamW, body added                     0.0477      0.0410      0.0202
#     AdamWScheduleFree, frozen first       0.0474      0.0464      0.0343
#     AdamWScheduleFree, body added         0.0474      0.0438      0.0293
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet schedulefree==1.4.1 torch==2.13.0 numpy==2.4.6 || exit 2
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'PY'
import copy
import warnings

import torch
from schedulefree import AdamWScheduleFree, SGDScheduleFree

LR, LONG, FROZEN = 0.001, 10_000, 4000
torch.set_num_threads(1)
warnings.simplefilter("error")


def moves(optimizer_class, frozen):
    """How far z and x of a weight have gone after 1, 10 and 100 gradients of 1, in learning rates."""
    weight, other = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer = optimizer_class([weight, other], lr=LR)
    schedule_free = hasattr(optimizer, "eval")
    if schedule_free:
        optimizer.train()
    fast, average = [], []
    for step in range(-frozen, 100):
        other.grad = torch.ones(1)
        if step >= 0:
            weight.grad = torch.ones(1)
        optimizer.step()
        if step in (0, 9, 99):
            if schedule_free:
                optimizer.eval()
            average.append(-weight.item() / LR)
            fast.append(-optimizer.state[weight].get("z", weight).item() / LR)
            if schedule_free:
                optimizer.train()
    return fast, average


print(f"{'way of a weight':38}{'z: 1':>8}{'10':>8}{'100':>8}{'x: 1':>12}{'10':>8}{'100':>8}")
for optimizer_class, same in ((torch.optim.AdamW, True), (AdamWScheduleFree, False), (SGDScheduleFree, False)):
    results = []
    for frozen in (0, LONG):
        fast, average = moves(optimizer_class, frozen)
        results.append(average)
        label = f"  {optimizer_class.__name__}, {'frozen first' if frozen else 'from the start'}"
        print(f"{label:38}" + "".join(f"{value:8.1f}" for value in fast), end="    ")
        print("".join(f"{value:8.3f}" for value in average))
        long_steps = frozen and optimizer_class is AdamWScheduleFree
        assert abs(fast[0] - (1 / 0.001**0.5 if long_steps else 1)) < 0.01, label
        assert abs(fast[2] - (593 if long_steps else 100)) < 0.5, label
    assert all(abs(one - other) < 0.01 for one, other in zip(*results)) == same
    assert same or all(other < 0.1 * one for one, other in zip(*results))

torch.manual_seed(0)
inputs = torch.randn(1024, 16)
teacher = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
start = copy.deepcopy(teacher)
with torch.no_grad():
    outputs = 3 * teacher(inputs) + 0.1 * torch.randn(1024, 1)
    start[0].weight += 0.3 * torch.randn(32, 16)
    start[2].weight.zero_()


def loss(model, rows=slice(None)):
    return (model(inputs[rows]) - outputs[rows]).square().mean()


def losses(optimizer_class, added):
    """The loss with x right before the body is trained as well, and 100 and 1000 steps later."""
    model, generator = copy.deepcopy(start), torch.Generator().manual_seed(0)
    body, head = list(model[0].parameters()), list(model[2].parameters())
    optimizer = optimizer_class(head if added else head + body, lr=LR)
    schedule_free = hasattr(optimizer, "eval")
    result = []
    model[0].requires_grad_(False)
    if schedule_free:
        optimizer.train()
    for step in range(FROZEN + 1001):
        if step == FROZEN:
            model[0].requires_grad_(True)
            if added:
                optimizer.add_param_group({"params": body})
                if schedule_free:
                    optimizer.train()  # Without it, `eval` leaves the new group out.
        if step in (FROZEN, FROZEN + 100, FROZEN + 1000):
            if schedule_free:
                optimizer.eval()
            result.append(loss(model).item())
            if schedule_free:
                optimizer.train()
        optimizer.zero_grad()
        loss(model, torch.randint(1024, (32,), generator=generator)).backward()
        optimizer.step()
    return result


print(f"{'loss of a network':38}  before   100 steps  1000 steps")
table = {}
for optimizer_class in (torch.optim.AdamW, AdamWScheduleFree):
    for added in (False, True):
        result = table[optimizer_class, added] = losses(optimizer_class, added)
        label = f"  {optimizer_class.__name__}, {'body added' if added else 'frozen first'}"
        print(f"{label:38}" + "{:8.4f}{:12.4f}{:12.4f}".format(*result))
plain = zip(table[torch.optim.AdamW, False], table[torch.optim.AdamW, True])
assert all(abs(one - other) < 0.001 for one, other in plain)
frozen, added = table[AdamWScheduleFree, False], table[AdamWScheduleFree, True]
assert abs(frozen[0] - added[0]) < 1e-4
assert frozen[0] - frozen[1] < 0.5 * (added[0] - added[1]) and frozen[2] > 1.1 * added[2]
PY
