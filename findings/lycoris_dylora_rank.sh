#!/usr/bin/env bash
# lycoris-lora 4.1.3, Python 3.11: DyLoRA evaluates and merges with random ranks, and what it saves is too weak
#
# Valid input: `create_lycoris` with algo="dylora", rank 16, alpha 8, and blocks of 1, 2 and 4 ranks; 4 is the default.
# The adapter of a small model is trained, and saved. Then the model is evaluated, in the mode of eval(), and merged.
#
# Expected: DyLoRA draws a rank in each step of the training, and uses the ranks up to it. After the training the rank
# is one that was chosen, here all 16. Saved weights have the strength that was trained.
#
# Seen: a rank is drawn for each layer in evaluations and merges too, and the result is another one each time. Training
# multiplies by alpha / number of blocks in use, but loaded weights, a LoRA then, by alpha / rank: with blocks of 4 they
# have 1/4 of the change. And a DyLoRA cannot read its own file: `load_weights` raises nothing, gives a list of missing
# keys, and leaves the adapter as new. LoRA is right in all of this, and the scales of blocks of 1 agree.
#
# Why it matters: a validation measures adapters that nobody chose, two merges of one training are two models, and the
# adapter looks undertrained where it is used. Who goes on with a saved training starts from nothing.
#
# Output (loss without the adapter; by hand with all 16 ranks and the scale of the training; with the saved weights,
# loaded by `create_lycoris_from_weights`, and by `load_weights`; lowest and highest of evaluations and of merges):
#                       without  by hand   loaded  load_weights    20 evaluations         20 merges
#   lora  , block of 1   0.1365   0.0004   0.0004        0.0004      0.0004 - 0.0004      0.0004 - 0.0004
#   dylora, block of 1   0.1365   0.0504   0.0504        0.1365      0.0494 - 0.0846      0.0499 - 0.0724
#   dylora, block of 2   0.1365   0.0324   0.0699        0.1365      0.0320 - 0.0657      0.0324 - 0.0517
#   dylora, block of 4   0.1365   0.0169   0.0951        0.1365      0.0169 - 0.0270      0.0169 - 0.0244
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 lycoris-lora==4.1.3 || exit 2
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'PY'
import copy
import logging
import random
import tempfile

import torch
from lycoris import create_lycoris, create_lycoris_from_weights

SIZE = 32
RANK = 16
ALPHA = 8
STEPS = 300
logging.disable(logging.INFO)  # It tells of every step; a warning would be printed.
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.GELU(), torch.nn.Linear(SIZE, SIZE))
model.requires_grad_(False)
inputs = torch.randn(64, SIZE)
goal = copy.deepcopy(model)
for layer in (goal[0], goal[2]):
    change = torch.randn(SIZE, RANK) @ torch.randn(RANK, SIZE)
    layer.weight.data += change * layer.weight.norm() / change.norm()
outputs = goal(inputs)


def loss(network):
    return (network(inputs) - outputs).square().mean()


def new_adapter(network, algorithm, block_size):
    torch.manual_seed(1)
    random.seed(1)
    options = {"linear_dim": RANK, "linear_alpha": ALPHA, "block_size": block_size, "warn_on_unmatched": False}
    adapter = create_lycoris(network, algo=algorithm, **options)
    adapter.apply_to()
    return adapter


def by_hand(saved, scale):
    network = copy.deepcopy(model)
    for layer in (0, 2):
        up, down = (saved[f"lycoris_{layer}.lora_{part}.weight"].detach() for part in ("up", "down"))
        network[layer].weight.data += scale * up @ down
    return loss(network).item()


print(f"{'':18}  without  by hand   loaded  load_weights    20 evaluations         20 merges")
for algorithm, block_size in (("lora", 1), ("dylora", 1), ("dylora", 2), ("dylora", 4)):
    trained, applied, resumed = copy.deepcopy(model), copy.deepcopy(model), copy.deepcopy(model)
    adapter = new_adapter(trained, algorithm, block_size)
    optimizer = torch.optim.Adam(adapter.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(trained).backward()
        optimizer.step()
    trained.eval()
    adapter.eval()
    saved = adapter.state_dict()
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        adapter.save_weights(file.name, None, None)
        create_lycoris_from_weights(1.0, file.name, applied)[0].apply_to()
        new_adapter(resumed, algorithm, block_size).load_weights(file.name)
    scale = ALPHA / RANK if algorithm == "lora" else ALPHA / (RANK // block_size)
    losses = [loss(model).item(), by_hand(saved, scale), loss(applied).item(), loss(resumed).item()]
    evaluations = [loss(trained).item() for _ in range(20)]
    merges = []
    adapter.restore()
    weights = copy.deepcopy(trained.state_dict())
    for _ in range(20):
        adapter.merge_to()
        merges.append(loss(trained).item())
        trained.load_state_dict(weights)
    ranges = [value for values in (evaluations, merges) for value in (min(values), max(values))]
    line = "".join(f"{value:9.4f}" for value in losses[:3]) + f"{losses[3]:14.4f}"
    line += f"{ranges[0]:12.4f} - {ranges[1]:.4f}{ranges[2]:12.4f} - {ranges[3]:.4f}"
    print(f"{algorithm:6}, block of {block_size}{line}")
    assert abs(by_hand(saved, ALPHA / RANK) - losses[2]) < 1e-5
    if algorithm == "lora":
        assert max(abs(value - losses[1]) for value in losses[2:] + evaluations + merges) < 1e-5
    else:
        assert losses[3] == losses[0], "nothing is loaded"
        assert max(evaluations) > 1.3 * min(evaluations) and max(merges) > 1.3 * min(merges), block_size
        assert losses[2] > 1.3 * losses[1] or block_size == 1, block_size
        # In one of the evaluations both layers drew all blocks.
        assert abs(min(evaluations) - losses[1]) < 1e-5 or block_size < 4, evaluations
PY
