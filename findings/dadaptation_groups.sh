#!/usr/bin/env bash
# dadaptation 3.2, Python 3.11: Lion, Adan and AdaGrad train a group with lr=0, and SGD decays it as the first group
#
# Valid input: two parameter groups, the head and the body of a small network. The body has lr=0, lr=0.1, or no
# weight_decay while the head has some, or the other way round.
#
# Expected: a body with lr=0 stays as it is. The README says of the learning rate that it is not ignored, and of version
# 2.0 that a rate of 0 is handled better; DAdaptLion, as DAdaptAdam and DAdaptSGD, raises for a group whose rate is
# neither that of the others nor 0, with the message that only 0 is supported. And each group has its own weight_decay,
# so that one can leave out biases and norms.
#
# Seen: in DAdaptLion, DAdaptAdan and DAdaptAdaGrad a body with lr=0 is trained as all the rest, to the last bit as if
# its rate was 1. Lion checks the rate and does not use it. Adan and AdaGrad take the rate of the first group for all,
# with lr=0.1 as well. DAdaptSGD takes the weight_decay of the first group for all: a body that is to have none decays,
# and one that is to have some does not, if the head comes first. There is no warning.
#
# Why it matters: lr=0 is an easy way to freeze an encoder or embeddings, and the groups with and without decay are what
# most training scripts make. The frozen part is trained away, while its group says lr=0. That DAdaptAdam ignored the
# rates of other groups was reported for an older version (kohya-ss/sd-scripts, issue 274); in 3.2 it does not, but for
# decoupled decay. Freeze with requires_grad=False, and give DAdaptSGD only groups that have the same decay.
#
# Output (how far the body is from its start after 100 steps, and then, for a decay of 0.001, the norm of its weights):
#   learning rate of the body          1         0       0.1
#     DAdaptAdam                   125.6       0.0   refused
#     DAdaptSGD                     22.5       0.0   refused
#     DAdaptLion                     8.2       8.2   refused
#     DAdaptAdan                    92.4      92.4      92.4
#     DAdaptAdaGrad                  3.9       3.9       3.9
#   weight_decay on                 none      head      body      both
#     DAdaptAdam                   125.3     122.7      14.1       9.0
#     DAdaptLion                     9.4       9.5       9.4       9.3
#     DAdaptAdan                    91.3      92.5      87.0      87.6
#     DAdaptAdaGrad                  5.9       6.0       5.5       5.4
#     DAdaptSGD                     21.6      16.0      21.6      16.0
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet dadaptation==3.2 torch==2.13.0 numpy==2.4.6 || exit 2
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'PY'
import warnings

import dadaptation
import torch

STEPS, DECAY = 100, 0.001
torch.set_num_threads(1)
torch.manual_seed(0)
inputs = torch.randn(256, 16)
labels = (inputs[:, 0] * inputs[:, 1] > 0).float()
warnings.simplefilter("error")


def body_after(optimizer_class, head_options, body_options, **settings):
    """The weights of the body before and after training, or None if the optimizer takes no such groups."""
    torch.manual_seed(1)
    body, head = torch.nn.Linear(16, 64), torch.nn.Linear(64, 1)
    before = body.weight.detach().clone()
    groups = [{"params": list(head.parameters()), **head_options}, {"params": list(body.parameters()), **body_options}]
    optimizer = optimizer_class(groups, **settings)
    for _ in range(STEPS):
        logits = head(torch.relu(body(inputs))).squeeze(1)
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
        try:
            optimizer.step()
        except RuntimeError as error:
            assert "different lr values" in str(error), error
            return before, None
    return before, body.weight.detach()


def distance(before, after):
    return "refused" if after is None else f"{(after - before).norm():.1f}"


print(f"{'learning rate of the body':26}{'1':>10}{'0':>10}{'0.1':>10}")
for name, honoured in (("Adam", True), ("SGD", True), ("Lion", False), ("Adan", False), ("AdaGrad", False)):
    optimizer_class = getattr(dadaptation, f"DAdapt{name}")
    results = [body_after(optimizer_class, {}, {"lr": lr}, weight_decay=0.0) for lr in (1.0, 0.0, 0.1)]
    print(f"  DAdapt{name:18}" + "".join(f"{distance(*result):>10}" for result in results))
    before = results[0][0]
    full, frozen, tenth = (after for _, after in results)
    assert not torch.equal(full, before), name
    assert torch.equal(frozen, before if honoured else full), name
    assert (tenth is None) == (name in ("Adam", "SGD", "Lion")), name
    assert tenth is None or torch.equal(tenth, full), name

print(f"{'weight_decay on':26}{'none':>10}{'head':>10}{'body':>10}{'both':>10}")
for name, honoured in (("Adam", True), ("Lion", True), ("Adan", True), ("AdaGrad", True), ("SGD", False)):
    optimizer_class = getattr(dadaptation, f"DAdapt{name}")
    pairs = ((0.0, 0.0), (DECAY, 0.0), (0.0, DECAY), (DECAY, DECAY))
    options = [({"weight_decay": head}, {"weight_decay": body}) for head, body in pairs]
    results = [body_after(optimizer_class, *both)[1].norm().item() for both in options]
    print(f"  DAdapt{name:18}" + "".join(f"{value:10.1f}" for value in results))
    none, only_head, only_body, both = results
    assert (only_head == both) == (only_body == none) == (not honoured), name
    assert none != both, name
PY
