#!/usr/bin/env bash
# netcal 1.4.0, Python 3.11: the PyTorch ConfidencePenalty rewards confidence; DCAPenalty ignores its weight
#
# Valid input: a small classifier, and a loss that is the cross entropy plus the penalty, as the documentation says. One
# label of five is wrong, so that a network becomes too confident without a penalty.
#
# Expected: ConfidencePenalty adds -weight * entropy, as in the paper that it names (Pereyra et al., 2017), and as the
# function `confidence_penalty` of the same file does. Then the loss is lower for flat predictions. DCAPenalty is
# multiplied by its weight, as MMCEPenalty is.
#
# Seen: ConfidencePenalty adds +weight * entropy. Its value is that of the function with the other sign, and training
# with it gives greater confidence than training without it. DCAPenalty has the same value for each weight. There is no
# warning.
#
# Why it matters: who uses the class against overconfidence gets more of it, and more with a greater weight. That is
# easily put down to the method. A search for the best weight of DCA finds only noise.
#
# Output (mean confidence, part that is right and cross entropy are those of new data):
#   penalty of predictions   by hand  function    class
#     flat                    -0.416    -0.416    0.416
#     sharp                   -0.003    -0.003    0.003
#   trained with       confidence   right   cross entropy
#     no penalty             0.77    0.61            1.42
#     by hand, 0.3           0.70    0.61            1.20
#     class, 0.3             0.82    0.62            1.42
#     class, -0.3            0.70    0.61            1.21
#   weight        0.1      1.0     10.0
#     DCA      0.2707   0.2707   0.2707
#     MMCE     0.0122   0.1222   1.2223
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 scipy==1.17.1 scikit-learn==1.9.1 tqdm==4.70.1 || exit 2
# Without its other dependencies: they are for Gaussian processes and plots.
"$work/venv/bin/pip" install --quiet --no-deps netcal==1.4.0 || exit 2
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'PY'
import warnings

import torch
from netcal.regularization import ConfidencePenalty, DCAPenalty, MMCEPenalty, confidence_penalty

CLASSES = 4
WEIGHT = 0.3
STEPS = 300
warnings.simplefilter("error")
torch.set_num_threads(1)


def data(seed):
    """Points around the centre of their class; one label of five is drawn anew."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (400,), generator=generator)
    points = 2 * torch.eye(CLASSES)[classes] + torch.randn(400, CLASSES, generator=generator)
    drawn = torch.randint(CLASSES, (400,), generator=generator)
    is_wrong = torch.rand(400, generator=generator) < 0.2
    return points, torch.where(is_wrong, drawn, classes)


def by_hand(logits, weight):
    return -weight * torch.distributions.Categorical(logits=logits).entropy().mean()


def by_netcal(logits, weight):
    return ConfidencePenalty(weight=weight, reduction="batchmean")(logits)


def trained(penalty, weight):
    """Of new data: the mean confidence, the part that is right, and the cross entropy."""
    torch.manual_seed(0)
    points, labels = data(1)
    model = torch.nn.Sequential(torch.nn.Linear(CLASSES, 64), torch.nn.ReLU(), torch.nn.Linear(64, CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        logits = model(points)
        loss = torch.nn.functional.cross_entropy(logits, labels) + penalty(logits, weight)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    points, labels = data(2)
    logits = model(points).detach()
    confidences, predictions = logits.softmax(1).max(1)
    right = (predictions == labels).float().mean().item()
    return confidences.mean().item(), right, torch.nn.functional.cross_entropy(logits, labels).item()


print("penalty of predictions   by hand  function    class")
for name, logits in (("flat", torch.zeros(2, CLASSES)), ("sharp", 8 * torch.eye(CLASSES)[:2])):
    right = by_hand(logits, WEIGHT).item()
    function = float(confidence_penalty(logits.softmax(1).numpy(), WEIGHT))
    own = by_netcal(logits, WEIGHT).item()
    print(f"  {name:20} {right:9.3f} {function:9.3f} {own:8.3f}")
    assert abs(function - right) < 1e-4 and abs(own + right) < 1e-4
print("trained with       confidence   right   cross entropy")
means = {}
for name, penalty, weight in (
    ("no penalty", by_hand, 0.0),
    ("by hand, 0.3", by_hand, WEIGHT),
    ("class, 0.3", by_netcal, WEIGHT),
    ("class, -0.3", by_netcal, -WEIGHT),
):
    means[name] = trained(penalty, weight)
    print(f"  {name:15} {means[name][0]:11.2f} {means[name][1]:7.2f} {means[name][2]:15.2f}")
assert means["by hand, 0.3"][0] < means["no penalty"][0] - 0.05
assert means["class, 0.3"][0] > means["no penalty"][0] + 0.01
assert abs(means["class, -0.3"][0] - means["by hand, 0.3"][0]) < 0.01
print("weight        0.1      1.0     10.0")
torch.manual_seed(0)
logits = torch.randn(64, CLASSES)
labels = torch.randint(CLASSES, (64,))
for name, penalty in (("DCA", DCAPenalty), ("MMCE", MMCEPenalty)):
    values = [penalty(weight=weight)(logits, labels).item() for weight in (0.1, 1.0, 10.0)]
    print(f"  {name:6}" + "".join(f"{value:9.4f}" for value in values))
    if name == "DCA":
        assert values[0] == values[1] == values[2]
    else:
        assert abs(values[2] - 100 * values[0]) < 1e-4 * values[2]
PY
