#!/usr/bin/env bash
# lycoris-lora 4.1.3, Python 3.11: a merge of LoHa applies alpha / rank twice, and with precise=True DoRA is left out
#
# Valid input: adapters of `create_lycoris` on a small model of Linear layers, of rank 16. They are trained, saved, and
# merged with `create_lycoris_from_weights` and `merge_to`. For LoHa the documentation recommends an alpha between 1 and
# half of the rank; the default is 1.
#
# Expected: the merged model computes what the model with the adapter does. The documentation gives alpha / rank as the
# ratio of a merge. The same weights, loaded and applied, or merged by hand, give the trained model.
#
# Seen: the forward pass of LoHa multiplies by alpha / rank, but `merge_to` by its square: with an alpha of 1, a merge
# has 1/16 of what was trained. LoRA is right. With precise=True, which is a merge in 64 bits, the magnitudes of DoRA
# are left out, and only the change of low rank is added. There is no warning.
#
# Why it matters: the merged model is close to the one before training, and so is all that is exported from it or
# measured with it. It looks as if the training had done little. Only with alpha = rank is LoHa right.
#
# Output (loss before training, with the trained adapter, with the saved weights applied, and with them merged; size of
# the merged change of a layer, divided by that of the adapter):
#                             before  trained  applied   merged    size
#   lora, alpha=16            0.0530   0.0010   0.0010   0.0010    1.00
#   lora, alpha=1             0.0530   0.0016   0.0016   0.0016    1.00
#   loha, alpha=16            0.0530   0.0004   0.0004   0.0004    1.00
#   loha, alpha=8             0.0530   0.0004   0.0004   0.0172    0.50
#   loha, alpha=4             0.0530   0.0004   0.0004   0.0331    0.25
#   loha, alpha=1             0.0530   0.0006   0.0006   0.0478    0.06
#   lora, precise             0.0530   0.0012   0.0012   0.0012    1.00
#   lora with DoRA            0.0530   0.0001   0.0001   0.0001    1.00
#   lora with DoRA, precise   0.0530   0.0001   0.0001   0.0287    0.84
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 lycoris-lora==4.1.3 || exit 2
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'PY'
import copy
import logging
import warnings

import torch
from lycoris import create_lycoris, create_lycoris_from_weights

SIZE = 64
RANK = 16
STEPS = 200
logging.disable(logging.INFO)  # It tells of every step; a warning would be printed.
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.GELU(), torch.nn.Linear(SIZE, SIZE))
model.requires_grad_(False)
inputs = torch.randn(128, SIZE)
# What is to be learned: a change of rank 4 in both layers, and rows that get longer or shorter.
goal = copy.deepcopy(model)
for layer in (goal[0], goal[2]):
    turn = torch.randn(SIZE, 4) @ torch.randn(4, SIZE)
    length = 1 + 0.5 * torch.randn(SIZE, 1)
    layer.weight.data = length * (layer.weight + turn * layer.weight.norm() / turn.norm() / 2)
outputs = goal(inputs)


def loss(network):
    return (network(inputs) - outputs).square().mean()


def by_hand(saved, layer, alpha):
    """The weights of a layer with its adapter, by the formulas of LoRA, LoHa and DoRA."""
    part = {name.split(".", 1)[1]: value for name, value in saved.items() if name.startswith(f"lycoris_{layer}.")}
    if "hada_w1_a" in part:
        change = (part["hada_w1_a"] @ part["hada_w1_b"]) * (part["hada_w2_a"] @ part["hada_w2_b"])
    else:
        change = part["lora_up.weight"] @ part["lora_down.weight"]
    weight = model[layer].weight + change * alpha / RANK
    if "dora_scale" in part:
        weight = weight * part["dora_scale"] / weight.norm(dim=1, keepdim=True)
    return weight


print(f"{'':23}   before  trained  applied   merged    size")
for label, algorithm, alpha, options, precise, right in (
    ("lora, alpha=16", "lora", 16, {}, False, True),
    ("lora, alpha=1", "lora", 1, {}, False, True),
    ("loha, alpha=16", "loha", 16, {}, False, True),
    ("loha, alpha=8", "loha", 8, {}, False, False),
    ("loha, alpha=4", "loha", 4, {}, False, False),
    ("loha, alpha=1", "loha", 1, {}, False, False),
    ("lora, precise", "lora", 4, {}, True, True),
    ("lora with DoRA", "lora", 4, {"dora_wd": True}, False, True),
    ("lora with DoRA, precise", "lora", 4, {"dora_wd": True}, True, False),
):
    torch.manual_seed(1)
    trained, applied, merged = copy.deepcopy(model), copy.deepcopy(model), copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapter = create_lycoris(
            trained, linear_dim=RANK, linear_alpha=alpha, algo=algorithm, warn_on_unmatched=False, **options
        )
        adapter.apply_to()
        optimizer = torch.optim.Adam(adapter.parameters(), lr=0.01)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss(trained).backward()
            optimizer.step()
        saved = {name: value.detach().clone() for name, value in adapter.state_dict().items()}
        create_lycoris_from_weights(1.0, "", applied, weights_sd=saved)[0].apply_to()
        create_lycoris_from_weights(1.0, "", merged, weights_sd=saved)[0].merge_to(precise=precise)
    assert not caught, caught
    losses = [loss(network).item() for network in (model, trained, applied, merged)]
    changes = [by_hand(saved, layer, alpha) - model[layer].weight for layer in (0, 2)]
    size = (merged[0].weight - model[0].weight).norm() / changes[0].norm()
    print(f"{label:23}" + "".join(f"{value:9.4f}" for value in losses) + f"{size:8.2f}")
    hand = copy.deepcopy(model)
    for layer, change in zip((0, 2), changes):
        hand[layer].weight.data += change
    assert all(torch.allclose(hand(inputs), network(inputs), atol=1e-5) for network in (trained, applied)), label
    assert torch.allclose(hand(inputs), merged(inputs), atol=1e-5) == right, label
    assert right or losses[3] > 5 * losses[1], label
    assert algorithm == "lora" or abs(size - alpha / RANK) < 0.001, label
PY
