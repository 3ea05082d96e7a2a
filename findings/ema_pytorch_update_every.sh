#!/usr/bin/env bash
# ema-pytorch 0.8.3, Python 3.11: with `update_every`, PostHocEMA averages over other steps than asked for
#
# Valid input: PostHocEMA with two sigma_rels, a third one synthesized from its checkpoints, and update_every=10, as in
# the README: "how often to actually update, to save on compute". The default is 100. 10000 steps.
#
# Expected: sigma_rel is the width of the average, relative to the length of the training (Karras et al., 2023). To
# update it at every 10th step makes it coarser, and nothing else.
#
# Seen: the decay is that of single steps, but it is applied once in update_every steps. The average forgets 10 or 100
# times too slowly, and much of it is the weights of the very first step. The synthesized model is wrong as well, since
# the checkpoints are taken for what was asked for. EMA, whose default is 10, has the same: with power=1 it is to be "a
# simple average", and its mean is at a tenth of the training instead of the half. There is no warning.
#
# Why it matters: the averaged model contains the untrained one, and the more so, the longer an average was asked for.
# It can evaluate worse than the model itself, as if averaging did not help. Only update_every=1 is right.
#
# Output (width of the average, mean of its times, both as a part of the training, and the share of the first step; here
# the values that are averaged are the times themselves):
#                                        width    mean  first step
#   update_every=1    sigma_rel=0.05     0.050   0.947       0.000
#   update_every=1    sigma_rel=0.28     0.280   0.539       0.000
#   update_every=1    synthesized 0.15   0.150   0.820       0.000
#   update_every=10   sigma_rel=0.05     0.246   0.642       0.000
#   update_every=10   sigma_rel=0.28     0.210   0.105       0.428
#   update_every=10   synthesized 0.15   0.317   0.242       0.314
#   update_every=100  sigma_rel=0.05     0.242   0.151       0.396
#   update_every=100  sigma_rel=0.28     0.075   0.012       0.942
#   update_every=100  synthesized 0.15   0.142   0.041       0.826
#   update_every=1    EMA, power=1       0.286   0.505       0.000
#   update_every=10   EMA, power=1       0.196   0.100       0.000
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet ema-pytorch==0.8.3 torch==2.13.0 numpy==2.4.6 || exit 2
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'PY'
import tempfile
import warnings

import torch
from ema_pytorch import EMA, PostHocEMA

STEPS = 10000
torch.set_num_threads(1)
warnings.simplefilter("error")


class Clock(torch.nn.Module):
    """Its weights are: whether it is the first step, the time as a part of the training, and the square of the time."""

    def __init__(self):
        super().__init__()
        self.values = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))


def trained(average, clock):
    for step in range(STEPS):
        time = (step + 1) / STEPS
        with torch.no_grad():
            clock.values.copy_(torch.tensor([float(step == 0), time, time * time], dtype=torch.float64))
        average.update()


def row(every, label, model):
    first, mean, square = model.values.tolist()
    width = (square - mean * mean) ** 0.5
    print(f"update_every={every:<3}  {label:16} {width:7.3f} {mean:7.3f} {first:11.3f}")
    return width, mean, first


def mean_of(sigma):
    """The mean time of an average of this width: the weights grow with the power gamma of the time."""
    low = 0.0
    high = 1000.0
    for _ in range(100):
        gamma = (low + high) / 2
        if ((gamma + 1) / ((gamma + 2) ** 2 * (gamma + 3))) ** 0.5 > sigma:
            low = gamma
        else:
            high = gamma
    return (gamma + 1) / (gamma + 2)


print(f"{'':36} width    mean  first step")
for every in (1, 10, 100):
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        average = PostHocEMA(
            clock,
            sigma_rels=(0.05, 0.28),
            update_every=every,
            checkpoint_every_num_steps=1000,
            checkpoint_folder=folder,
            checkpoint_dtype=torch.float64,
        )
        trained(average, clock)
        synthesized = average.synthesize_ema_model(sigma_rel=0.15)
    for label, sigma, model in (
        ("sigma_rel=0.05", 0.05, average.ema_models[0]),
        ("sigma_rel=0.28", 0.28, average.ema_models[1]),
        ("synthesized 0.15", 0.15, synthesized),
    ):
        width, mean, first = row(every, label, model.ema_model)
        if every == 1:
            assert abs(width - sigma) < 0.001 and abs(mean - mean_of(sigma)) < 0.001 and first < 0.001, label
        else:
            assert abs(mean - mean_of(sigma)) > 0.25, label
for every in (1, 10):
    clock = Clock()
    average = EMA(clock, beta=0.999999, power=1, update_every=every)
    trained(average, clock)
    _, mean, _ = row(every, "EMA, power=1", average.ema_model)
    assert abs(mean - 0.505) < 0.001 if every == 1 else mean < 0.15, every
PY
