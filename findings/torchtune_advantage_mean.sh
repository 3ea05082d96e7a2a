#!/usr/bin/env bash
# torchtune 0.6.1, Python 3.11: "normalized" advantages of PPO keep their mean, so that bad answers are reinforced
#
# Valid input: `estimate_advantages` with value estimates of 0, as of a value head before training, for four answers of
# one token, with the rewards 1 to 4, and the same with 5 added or 10 taken off. Then one step with `PPOLoss`.
#
# Expected: normalized advantages have a mean of 0 and a deviation of 1, so that a constant in all rewards changes
# nothing, and answers below the mean become less likely. `whiten` is said to be taken from TRL, where the mean is
# taken off by default, and stays only with shift_mean=False.
#
# Seen: in torchtune the option works the other way round: with shift_mean=True, its default, the mean is added again.
# `estimate_advantages` calls it so, with no option to change that. Its advantages have a deviation of 1 around the old
# mean: with positive rewards all four answers become more likely, the worst one, too; with negative ones all become
# less likely. `whiten(..., shift_mean=False)` gives the right values. There is no warning.
#
# Why it matters: the PPO recipe of torchtune gets its advantages here. Until the value head has learned the level of
# the rewards, what is learned is that level more than the difference between answers; it depends on an offset that a
# reward model has by chance.
#
# Output (rewards, advantages by torchtune, and those with mean 0; then the change of probability):
#   four answers: rewards, advantages by torchtune, and the right ones
#        1.00   2.00   3.00   4.00      1.34   2.11   2.89   3.66     -1.16  -0.39   0.39   1.16
#        6.00   7.00   8.00   9.00      6.34   7.11   7.89   8.66     -1.16  -0.39   0.39   1.16
#       -9.00  -8.00  -7.00  -6.00     -8.66  -7.89  -7.11  -6.34     -1.16  -0.39   0.39   1.16
#   the same answers: change of their probability by one step, in percent, with these and with the right advantages
#        0.02   0.26   0.51   0.77     -0.36  -0.12   0.12   0.37
#        0.78   1.04   1.30   1.57     -0.36  -0.12   0.12   0.37
#       -1.49  -1.28  -1.06  -0.84     -0.36  -0.12   0.12   0.37
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
# torchao 0.10.0 is of the time of torchtune 0.6.1, which imports what later releases of torchao have moved.
packages="torch==2.13.0 numpy==2.4.6 torchao==0.10.0 datasets==5.2.0 torchtune==0.6.1"
"$work/venv/bin/pip" install --quiet $packages || exit 2
OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 "$work/venv/bin/python" - 2>"$work/log" <<'PY' || { cat "$work/log"; exit 1; }
import torch
from torchtune import rlhf
from torchtune.rlhf.loss import PPOLoss

torch.set_num_threads(1)


def advantages_of(rewards):
    """For answers of one token, and value estimates of 0."""
    return rlhf.estimate_advantages(torch.zeros_like(rewards), rewards, gamma=1.0, lmbda=0.95)[0]


def normalized(advantages):
    return (advantages - advantages.mean()) / advantages.std()


print("four answers: rewards, advantages by torchtune, and the right ones")
for offset in (0.0, 5.0, -10.0):
    rewards = torch.tensor([[1.0], [2.0], [3.0], [4.0]]) + offset
    seen = advantages_of(rewards)
    right = normalized(rewards)
    rows = [values.flatten().tolist() for values in (rewards, seen, right)]
    print("  " + "   ".join("".join(f"{value:7.2f}" for value in row) for row in rows))
    assert torch.allclose(seen, right + rewards.mean(), atol=1e-4)
    assert torch.allclose(rlhf.whiten(rewards, shift_mean=False), right, atol=1e-4)


def changes_by_step(advantages):
    """What one step with torchtune's loss adds to the probabilities of the four, of eight answers that are possible."""
    logits = torch.zeros(8, requires_grad=True)
    old = torch.zeros(8).log_softmax(-1)[:4].unsqueeze(1)
    new = logits.log_softmax(-1)[:4].unsqueeze(1)
    zeros = torch.zeros(4, 1)
    PPOLoss()(old, new, advantages, zeros, zeros, zeros)[0].backward()
    return (logits - 0.1 * logits.grad).softmax(-1)[:4].detach() - 1 / 8


print("the same answers: change of their probability by one step, in percent, with these and with the right advantages")
for offset in (0.0, 5.0, -10.0):
    rewards = torch.tensor([[1.0], [2.0], [3.0], [4.0]]) + offset
    seen = changes_by_step(advantages_of(rewards))
    right = changes_by_step(normalized(rewards))
    print("  " + "   ".join("".join(f"{100 * value:7.2f}" for value in row.tolist()) for row in (seen, right)))
    assert (right[:2] < 0).all() and (right[2:] > 0).all()
    assert (seen > 0).all() if offset >= 0 else (seen < 0).all()
PY
