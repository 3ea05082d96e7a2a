#!/usr/bin/env bash
# mergekit 0.1.5, Python 3.11: for the usual small changes of fine-tuning, SCE gives all models the same weight
#
# Valid input: the merge method "sce" for a base model and two fine-tuned ones, in memory and in 32 bits.
#
# Expected: SCE (FuseChat, 2024), as in the documentation of mergekit: per matrix, the weight of a model comes from the
# mean of the squares of its changes, "normalized across the models". So only their proportion counts: a model whose
# changes are 4 times as large has 16 times the weight, 0.941 of 1, whether the changes are large or small.
#
# Seen: if these means have a sum below 1e-6, all models get the same weight: with two models, if the root mean squares
# of the changes are below about 0.0007. Fine-tuning is mostly there: the paper of DARE (2024) finds that the changes of
# fine-tuned language models are typically within 0.002. Nothing is raised.
#
# Why it matters: "adaptive" weights by matrix are what SCE is taken for. Below the line it is a plain mean with the
# signs voted on, for each of the matrices; near the line some matrices are weighted and some are not. A model that
# hardly changed in a matrix dilutes the one that learned there. SCE against a mean or TIES is then no comparison.
#
# Output:
# two models, the changes of A 4 times as large as those of B; the weight of A
#     root mean square of A's changes     by the paper     seen
#                               1e-02            0.942    0.942
#                               2e-03            0.942    0.942
#                               9e-04            0.942    0.500
#                               1e-04            0.942    0.500
# two fine-tunings of one network, AdamW, learning rate 1e-5
#     steps of A and B                                  60 and 15
#     weights of A by the paper, all matrices      0.909 to 0.927
#     weights of A, seen                           0.500 to 0.500
#     error of the merged changes                             26%
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet mergekit==0.1.5 transformers==5.24.0 torch==2.13.0 numpy==2.4.6 || exit 2
OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 "$work/venv/bin/python" - <<'PY'
import copy

import torch
from mergekit.merge_methods import merge_state_dicts, merge_tensors


def by_paper(changes: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights, and the merged change: the mean, by weights, of the changes with the sign of their sum."""
    stacked = torch.stack(changes)
    weights = stacked.square().flatten(1).mean(1)
    weights = (weights / weights.sum()).view(-1, *[1] * (stacked.dim() - 1))
    sign = torch.where(stacked.sum(0) >= 0, 1.0, -1.0)
    agreeing = weights * (stacked.sign() == sign)
    return weights.flatten(), (agreeing * stacked).sum(0) / agreeing.sum(0).clamp(min=1e-12)


def weight_seen(changes: list[torch.Tensor], merged: torch.Tensor) -> float:
    """The weight of the first of two models, from the places where both have the same sign."""
    a, b = changes
    same = (a.sign() == b.sign()) & ((a - b).abs() > 0.1 * (a - b).abs().max())
    return float(((merged - b)[same] / (a - b)[same]).median())


torch.manual_seed(0)
print("two models, the changes of A 4 times as large as those of B; the weight of A")
print("    root mean square of A's changes     by the paper     seen")
base = torch.zeros(128, 128)
a, b = torch.randn(128, 128), torch.randn(128, 128) / 4
for size in (1e-2, 2e-3, 9e-4, 1e-4):
    changes = [size * a, size * b]
    merged = merge_tensors([base, *(base + change for change in changes)], "sce", base_index=0) - base
    right, expected = by_paper(changes)
    seen = weight_seen(changes, merged)
    print(f"{size:35.0e}{right[0]:17.3f}{seen:9.3f}")
    assert abs(right[0] - 16 / 17) < 0.002
    assert abs(seen - (right[0] if size > 1e-3 else 0.5)) < 0.001
    assert torch.allclose(merged, expected, atol=1e-4 * size) == (size > 1e-3)

BASE = torch.nn.Sequential(
    torch.nn.Embedding(64, 32), torch.nn.Flatten(), torch.nn.Linear(256, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)
)
for parameter in BASE.parameters():
    if parameter.dim() == 2:
        torch.nn.init.normal_(parameter, std=0.05)


def fine_tuned(steps: int, seed: int) -> dict[str, torch.Tensor]:
    model, generator = copy.deepcopy(BASE), torch.Generator().manual_seed(seed)
    contexts = torch.randint(0, 64, (256, 8), generator=generator)
    targets = torch.randint(0, 64, (256,), generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for _ in range(steps):
        batch = torch.randint(0, 256, (32,), generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(contexts[batch]), targets[batch]).backward()
        optimizer.step()
    return {name: tensor.detach().double() for name, tensor in model.state_dict().items()}


start = {name: tensor.detach().double() for name, tensor in BASE.state_dict().items()}
models = {"base": start, "A": fine_tuned(60, 1), "B": fine_tuned(15, 2)}
merged = merge_state_dicts(models, "sce", base="base")
right, seen, wrong, all_of_it = [], [], 0.0, 0.0
for name in start:
    if start[name].dim() == 2:
        changes = [models[key][name] - start[name] for key in "AB"]
        weights, expected = by_paper(changes)
        right.append(float(weights[0]))
        seen.append(weight_seen(changes, merged[name] - start[name]))
        wrong += float((merged[name] - start[name] - expected).square().sum())
        all_of_it += float(expected.square().sum())
error = (wrong / all_of_it) ** 0.5
print("two fine-tunings of one network, AdamW, learning rate 1e-5")
print("    steps of A and B                                  60 and 15")
print(f"    weights of A by the paper, all matrices      {min(right):.3f} to {max(right):.3f}")
print(f"    weights of A, seen                           {min(seen):.3f} to {max(seen):.3f}")
print(f"    error of the merged changes                             {error:.0%}")
assert min(right) > 0.8 and max(abs(each - 0.5) for each in seen) < 0.001 and error > 0.2
PY
