#!/usr/bin/env bash
# mergekit 0.1.5, Python 3.11: Multi-SLERP is a mean scaled to the right length, with no spherical interpolation
#
# Valid input: the merge method "multislerp" for two or three models with unequal weights, with and without a base.
#
# Expected: "barycentric interpolation on a hypersphere", which "projects points onto a tangent space at their weighted
# Euclidean mean, performs interpolation, and projects back", says the documentation. The README has it as "Barycentric
# SLERP for multiple models". With two models this is SLERP: the weight 0.1 goes a tenth of the angle. With more, it is
# the point from which the models, as weighted directions as long as their angles, have the sum 0.
#
# Seen: the weighted mean of the unit vectors, scaled. The tangent space is taken at this very mean, and the models are
# put there by an orthogonal projection, so that their weighted sum is 0 in all cases, and projecting back 0 gives the
# mean. The second and third step never change anything. Vectors at right angles, as the changes of models fine-tuned
# for different tasks nearly are: a weight of 0.1 moves 0.07 of the angle, and in SLERP of the same package 0.1.
#
# Why it matters: the method is offered as the SLERP for more than two models. The models with small weights get up to
# 36 % less than that (at right angles), and weights found with slerp or nuslerp do not carry over. A comparison with a
# linear merge measures hardly more than the length of the vector. Two models with equal weights come out right.
#
# Output:
# two models at right angles: share of the angle from A to B
#   weight of B     SLERP by hand     nuslerp   multislerp   mean, scaled
#          0.05             0.050       0.050        0.033          0.033
#          0.10             0.100       0.100        0.070          0.070
#          0.25             0.250       0.250        0.205          0.205
#          0.50             0.500       0.500        0.500          0.500
# three models on a base, weights 0.6, 0.3 and 0.1: degrees to each, and the sum of the weighted logarithms
#   by hand                31.7   56.4   71.1     0.000
#   multislerp             28.5   59.1   73.2     0.053
# 200 random merges: largest difference from the mean, scaled: 0.000000
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet mergekit==0.1.5 transformers==5.24.0 torch==2.13.0 numpy==2.4.6 || exit 2
OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 "$work/venv/bin/python" - <<'PY'
from math import acos, degrees, pi, sin

import torch
from mergekit.merge_methods import merge_tensors

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


def angle(a: torch.Tensor, b: torch.Tensor) -> float:
    return acos(min(1.0, float((a * b).sum() / (a.norm() * b.norm()))))


def mean_scaled(models: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    mean = sum(weight * model / model.norm() for weight, model in zip(weights, models))
    return mean / mean.norm() * sum(weight * model.norm() for weight, model in zip(weights, models))


def slerp(a: torch.Tensor, b: torch.Tensor, t: float) -> torch.Tensor:
    theta = angle(a, b)
    return (sin((1 - t) * theta) * a + sin(t * theta) * b) / sin(theta)


def logarithms(point: torch.Tensor, models: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    """The sum of the weighted directions, as long as the angles, from a point of the sphere to the models."""
    total, point = torch.zeros_like(point), point / point.norm()
    for weight, model in zip(weights, models):
        unit = model / model.norm()
        tangent = unit - (unit * point).sum() * point
        total += weight * angle(point, unit) * tangent / tangent.norm()
    return total


def spherical_mean(models: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    point = mean_scaled(models, weights)
    point /= point.norm()
    for _ in range(100):
        step = logarithms(point, models, weights)
        size = step.norm()
        if size > 1e-12:
            point = torch.cos(size) * point + torch.sin(size) * step / size
    return point


def merged(method: str, models: list[torch.Tensor], weights: list[float], base: torch.Tensor | None) -> torch.Tensor:
    """The vector from the base, if there is one."""
    if base is None:
        return merge_tensors(models, method, parameters={"weight": weights})
    tensors = [base, *(base + model for model in models)]
    return merge_tensors(tensors, method, parameters={"weight": weights}, base_index=0) - base


print("two models at right angles: share of the angle from A to B")
print("  weight of B     SLERP by hand     nuslerp   multislerp   mean, scaled")
a, b = torch.randn(8, 8), torch.randn(8, 8)
b -= (a * b).sum() / a.square().sum() * a
b *= a.norm() / b.norm()
for t in (0.05, 0.1, 0.25, 0.5):
    weights = [1 - t, t]
    results = [slerp(a, b, t), *(merged(kind, [a, b], weights, None) for kind in ("nuslerp", "multislerp"))]
    results.append(mean_scaled([a, b], weights))
    by_hand, nuslerp, seen, mean = (angle(a, result) / (pi / 2) for result in results)
    print(f"{t:13.2f}{by_hand:18.3f}{nuslerp:12.3f}{seen:13.3f}{mean:15.3f}")
    assert abs(by_hand - t) < 1e-6 and abs(nuslerp - t) < 1e-6 and abs(seen - mean) < 1e-6
    assert abs(angle(a, spherical_mean([a, b], weights)) / (pi / 2) - t) < 1e-6
    assert t == 0.5 or seen < 0.9 * t

print("three models on a base, weights 0.6, 0.3 and 0.1: degrees to each, and the sum of the weighted logarithms")
base, models, weights = torch.randn(8, 8), [0.1 * torch.randn(8, 8) for _ in range(3)], [0.6, 0.3, 0.1]
points = {"by hand": spherical_mean(models, weights), "multislerp": merged("multislerp", models, weights, base)}
for name, point in points.items():
    left = float(logarithms(point, models, weights).norm())
    print(f"  {name:20}" + "".join(f"{degrees(angle(point, model)):7.1f}" for model in models) + f"{left:10.3f}")
    assert left < 1e-6 if name == "by hand" else left > 0.05
assert torch.allclose(points["multislerp"], mean_scaled(models, weights), atol=1e-6)

largest = 0.0
for number in range(200):
    models = [torch.randn(6, 6) * float(torch.rand(()) + 0.1) for _ in range(2 + number % 4)]
    weights = (torch.rand(len(models)) + 0.01).tolist()
    weights = [weight / sum(weights) for weight in weights]
    seen = merged("multislerp", models, weights, torch.randn(6, 6) if number % 2 else None)
    right = mean_scaled(models, weights)
    largest = max(largest, float((seen - right).norm() / right.norm()))
print(f"200 random merges: largest difference from the mean, scaled: {largest:.6f}")
assert largest < 1e-5
PY
