#!/usr/bin/env bash
# liger-kernel 0.8.5, Python 3.11: distillation from a padded vocabulary depends on the level of the student's logits
#
# Valid input: LigerFusedLinearJSDLoss with a teacher that has 128 tokens more than the student. Both have the same
# tokenizer, only the teacher's output is padded, as in Qwen2.5: 151936 tokens at 3B, 152064 at 72B. The code has a
# branch for this case. Here the student has the teacher's weights for all tokens that it has, and the teacher gives the
# others a probability of almost 0.
#
# Expected: a loss and a gradient of 0. To add the same vector to all rows of the student's output weights moves all its
# logits alike and changes no probability, so it cannot change the loss.
#
# Seen: the loss is anything from 0 to its maximum, log 2. The student's logits are filled up with zeros before the
# softmax, not with -inf, so the missing tokens get the probability that belongs to a logit of 0. Where the logits of a
# student lie below 0, most of its probability goes to tokens that it does not have.
#
# Why it matters: cross-entropy leaves the level of the logits open, so it differs from model to model, and with it what
# is trained here. At a low level a perfect student gets the loss of a useless one, with a gradient of 0 at the lowest;
# in between it learns to lift its logits over 0. Cut the teacher's weights to the student's tokens instead.
#
# Output (level that is added to the student's logits; loss, with beta=0.5, and size of its gradient; loss with the
# teacher cut; probability that the 128 zeros get):
#   level      loss  gradient  teacher cut  missing tokens
#      20    0.0000    0.0000       0.0000          0.0000
#      10    0.0000    0.0000       0.0000          0.0000
#       0    0.0017    0.0003       0.0000          0.0049
#      -5    0.1480    0.0174       0.0000          0.3428
#     -10    0.6330    0.0219       0.0000          0.9688
#     -20    0.6931    0.0000       0.0000          1.0000
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 || exit 2
# Without its dependencies: triton is only needed for kernels on a GPU, not for the chunked losses.
"$work/venv/bin/pip" install --quiet --no-deps liger-kernel==0.8.5 || exit 2
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - <<'PY'
import math
import warnings

import torch
from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

SIZE = 32
TOKENS = 1000
PADDING = 128
torch.set_num_threads(1)
torch.manual_seed(0)
hidden = torch.randn(64, SIZE)
hidden[:, 0] = 1.0  # a channel that is always on: its weights are the level of the logits
weight = torch.randn(TOKENS + PADDING, SIZE) * 0.5
weight[:, 0] = 0.0
weight[TOKENS:] = 0.0
weight[TOKENS:, 0] = -20.0  # tokens that the teacher has never seen
labels = torch.randint(0, TOKENS, (64,))


def distilled(student, teacher):
    """The loss, and the size of its gradient."""
    student = student.clone().requires_grad_()
    loss_function = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, compiled=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss = loss_function(hidden.clone().requires_grad_(), student, hidden, teacher, labels)
    assert not any("vocab" in str(w.message) or "pad" in str(w.message) for w in caught), caught
    loss.backward()
    return loss.item(), student.grad.norm().item()


teacher = torch.softmax(hidden @ weight.T, dim=1)
assert teacher[:, TOKENS:].sum(1).max() < 1e-6
print("level      loss  gradient  teacher cut  missing tokens")
seen = []
for level in (20, 10, 0, -5, -10, -20):
    student = weight[:TOKENS].clone()
    student[:, 0] += level
    assert torch.allclose(torch.softmax(hidden @ student.T, 1), teacher[:, :TOKENS], atol=1e-5)
    logits = hidden @ student.T
    missing = torch.softmax(torch.cat([logits, torch.zeros(64, PADDING)], 1), 1)[:, TOKENS:].sum(1).mean().item()
    loss, gradient = distilled(student, weight)
    cut, _ = distilled(student, weight[:TOKENS])
    seen.append(loss)
    print(f"{level:5} {loss:9.4f} {gradient:9.4f} {abs(cut):12.4f} {missing:15.4f}")
    assert abs(cut) < 1e-4
assert abs(seen[0]) < 1e-3 and seen[3] > 0.01 and abs(seen[-1] - math.log(2)) < 0.01, seen
PY
