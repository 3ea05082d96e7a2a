#!/usr/bin/env bash
# liger-kernel 0.8.5, Python 3.11: the KL penalty of LUSPO goes to the padding
#
# Valid input: LigerFusedLinearGRPOLoss with loss_type="luspo", sequence-level ratios, as this loss is meant, and the
# default beta=0.04. Two answers of 4 and 12 tokens, in rows of 12 to 64 tokens, as the longest answer of a batch asks
# for. Both got the mean reward, so that the loss is the KL penalty alone.
#
# Expected: padding changes nothing. With beta=0 it does not.
#
# Seen: the penalty is averaged over all positions of the row, padding included, and multiplied by the number of tokens.
# So a token of an answer gets the part (length of the answer / length of the row) of its penalty, and the rest is the
# penalty of the padding, where the hidden states are not those of an answer. A comment says that this matches TRL, but
# TRL 1.16.0 masks the padding before it sums. There is no warning.
#
# Why it matters: short answers are hardly held to the reference model. Instead the weights are moved to keep what the
# model would say behind the end of the answer, the more, the longer the longest answer of the batch. The loss hardly
# changes, and says nothing about it.
#
# Output (loss, and what is right; gradient of the hidden states of the short and of the long answer, divided by the
# right one; part of the squared gradient that is at the padding; cosine of the gradient of the weights with the right
# one):
#                            loss   right  short   long  padding  cosine
#   beta=0.0, row of 64    4.4207  4.4207   1.00   1.00     0.00    1.00
#   beta=0.04, row of 12   0.0107  0.0131   0.33   1.00     0.05    0.89
#   beta=0.04, row of 16   0.0111  0.0131   0.25   0.75     0.27    0.73
#   beta=0.04, row of 32   0.0146  0.0131   0.12   0.38     0.81    0.30
#   beta=0.04, row of 64   0.0120  0.0131   0.06   0.19     0.88    0.19
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 || exit 2
# Without its dependencies: Triton is not needed here.
"$work/venv/bin/pip" install --quiet --no-deps liger-kernel==0.8.5 || exit 2
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'PY'
import warnings

import torch
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

SIZE = 32
TOKENS = 200
LONGEST = 64
BETA = 0.04
torch.set_num_threads(1)
torch.manual_seed(0)
lengths = torch.tensor([4, 12])
all_states = torch.randn(2, LONGEST, SIZE)
all_answers = torch.randint(1, TOKENS, (2, LONGEST))
weight = torch.randn(TOKENS, SIZE) * 0.3
reference_weight = weight + 0.05 * torch.randn(TOKENS, SIZE)


def log_probabilities(states, matrix, tokens):
    return torch.log_softmax(states @ matrix.T, dim=2).gather(2, tokens.unsqueeze(2)).squeeze(2)


def by_liger(states, matrix, tokens, mask, advantages, old, beta):
    loss_function = LigerFusedLinearGRPOLoss(
        beta=beta, loss_type="luspo", importance_sampling_level="sequence", compiled=False
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss, _ = loss_function(
            states,
            matrix,
            tokens,
            mask,
            advantages,
            old_per_token_logps=old,
            ref_input=states.detach(),
            ref_weight=reference_weight,
        )
    assert not caught, caught
    return loss


def by_hand(states, matrix, tokens, mask, advantages, old, beta):
    new = log_probabilities(states, matrix, tokens)
    reference = log_probabilities(states.detach(), reference_weight, tokens)
    ratio = torch.exp(((new - old) * mask).sum(1) / mask.sum(1)).unsqueeze(1)
    gain = torch.minimum(ratio * advantages.unsqueeze(1), ratio.clamp(0.8, 1.2) * advantages.unsqueeze(1))
    penalty = torch.exp(reference - new) - (reference - new) - 1
    return ((beta * penalty - gain) * mask).sum(1).mean()


def gradients(function, width, advantages, beta):
    """The loss, and its gradients for the hidden states and for the weights of the head."""
    states = all_states[:, :width].clone().requires_grad_()
    matrix = weight.clone().requires_grad_()
    mask = (torch.arange(width) < lengths.unsqueeze(1)).long()
    tokens = torch.where(mask == 1, all_answers[:, :width], 0)
    old = log_probabilities(states, matrix, tokens).detach() - 0.1
    loss = function(states, matrix, tokens, mask, torch.tensor(advantages), old, beta)
    loss.backward()
    return loss.item(), states.grad, matrix.grad


print("                         loss   right  short   long  padding  cosine")
for width, beta, advantages in (
    (64, 0.0, [1.0, -1.0]),
    (12, BETA, [0.0, 0.0]),
    (16, BETA, [0.0, 0.0]),
    (32, BETA, [0.0, 0.0]),
    (64, BETA, [0.0, 0.0]),
):
    loss, own_states, own_weights = gradients(by_liger, width, advantages, beta)
    right, right_states, right_weights = gradients(by_hand, width, advantages, beta)
    parts = []
    for row, length in enumerate(lengths.tolist()):
        parts.append((own_states[row, :length].norm() / right_states[row, :length].norm()).item())
    padding = (own_states[0, 4:].square().sum() + own_states[1, 12:].square().sum()) / own_states.square().sum()
    cosine = torch.cosine_similarity(own_weights.flatten(), right_weights.flatten(), dim=0).item()
    label = f"beta={beta}, row of {width}"
    print(
        f"{label:21} {loss:7.4f} {right:7.4f} {parts[0]:6.2f} {parts[1]:6.2f} {padding.item():8.2f} {cosine:7.2f}"
    )
    if beta == 0:
        assert abs(loss - right) < 1e-4 and torch.allclose(own_weights, right_weights, atol=1e-5), label
        assert padding == 0, label
    else:
        assert abs(parts[0] - 4 / width) < 0.001 and abs(parts[1] - 12 / width) < 0.001, label
        assert cosine < 0.95 and padding > 0.01, label
PY
