#!/usr/bin/env bash
# lycoris-lora 4.1.3, Python 3.11: rank_dropout of Diag-OFT drops the model's own weights, bypass_mode turns the bias
#
# Valid input: adapters of `create_lycoris` on a small model of two Linear layers, with blocks or ranks of 8. Where
# something is to be learned, it is weights that are turned within their blocks, which Diag-OFT can do.
#
# Expected: a rank_dropout drops parts of the change that an adapter makes; so a comment in the source puts it. An
# adapter that was not trained changes nothing, so nothing can be dropped. If there is nothing to learn, the loss is 0
# and stays there. And the trained adapter, saved and merged, is the model that was trained.
#
# Seen: Diag-OFT drops entries of the rotation itself, not of its difference from the identity. Of the weights of the
# model, the part rank_dropout of the rows becomes 0, and the others grow by 1 / (1 - rank_dropout). Training then moves
# away from what is right, to make up for the rows that are missing. BOFT ignores rank_dropout. With bypass_mode=True
# the output of the layer is turned, with its bias, but a merge turns the weights only, as training without bypass_mode
# does; BOFT has this, too. Without a bias a merge is right. There is no warning. (By the source, quantized layers
# always get bypass_mode.)
#
# Why it matters: a small dropout, meant against overfitting, damages the whole model in each step of training, and what
# is trained is a repair of that damage. The merge of a model whose layers have a bias, as those of Qwen2, is another
# model than the one that was trained and evaluated.
#
# Output (size of the change of the output, part of the rows of the weights that are 0, and size of the others; loss in
# the last step of training, and after training with nothing to learn; loss with the trained adapter, and merged):
#   before training         change  rows of 0  others
#     lora, 0.1              0.000       0.00    1.00
#     lokr, 0.1              0.000       0.00    1.00
#     full, 0.1              0.000       0.00    1.00
#     diag-oft, 0.02         0.091       0.02    1.02
#     diag-oft, 0.1          0.222       0.10    1.11
#     diag-oft, 0.5          0.813       0.51    2.00
#   nothing to learn      training   after
#     lokr, 0.1             0.0000  0.0000
#     full, 0.1             0.0000  0.0000
#     diag-oft, 0.02        0.0018  0.0005
#     diag-oft, 0.1         0.0155  0.0015
#     diag-oft, 0.5         0.1696  0.0266
#   turned weights              after  merged
#     diag-oft                  0.0000  0.0000
#     diag-oft, bypass          0.0116  0.0242
#     diag-oft, bypass, no bias 0.0000  0.0000
#     boft                      0.0000  0.0000
#     boft, bypass              0.0035  0.0092
#     boft, bypass, no bias     0.0000  0.0000
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
RANK = 8
STEPS = 300
TIMES = 200
logging.disable(logging.WARNING)  # It tells of every step, and that the model has no convolutions.
torch.set_num_threads(1)


def make_model(bias):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(SIZE, SIZE, bias=bias), torch.nn.GELU(), torch.nn.Linear(SIZE, SIZE, bias=bias)
    )
    for layer in (model[0], model[2]):
        if bias:
            torch.nn.init.normal_(layer.bias, std=0.5)
    return model.requires_grad_(False)


def turned(model):
    goal = copy.deepcopy(model)
    for layer in (goal[0], goal[2]):
        for block in layer.weight.data.split(RANK):
            turn = 0.3 * torch.randn(RANK, RANK)
            block.copy_(torch.linalg.matrix_exp(turn - turn.T) @ block)
    return goal


def adapted(model, algorithm, options):
    network = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapter = create_lycoris(
            network, linear_dim=RANK, linear_alpha=RANK, algo=algorithm, warn_on_unmatched=False, **options
        )
        adapter.apply_to()
    assert not caught, caught
    return network, adapter


def trained(model, goal, algorithm, options):
    """The last loss of training, the loss with the adapter afterwards, and with the saved adapter merged."""
    torch.manual_seed(1)
    outputs = goal(inputs)
    network, adapter = adapted(model, algorithm, options)
    optimizer = torch.optim.Adam(adapter.parameters(), lr=0.01)
    adapter.train()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (network(inputs) - outputs).square().mean()
        loss.backward()
        optimizer.step()
    adapter.eval()
    saved = {name: value.detach().clone() for name, value in adapter.state_dict().items()}
    merged = copy.deepcopy(model)
    create_lycoris_from_weights(1.0, "", merged, weights_sd=saved)[0].merge_to()
    return [loss.item(), *((part(inputs) - outputs).square().mean().item() for part in (network, merged))]


torch.manual_seed(2)
inputs = torch.randn(128, SIZE)
model = make_model(bias=True)

print("before training         change  rows of 0  others")
for algorithm, rate in (
    ("lora", 0.1), ("lokr", 0.1), ("full", 0.1), ("diag-oft", 0.02), ("diag-oft", 0.1), ("diag-oft", 0.5)
):
    torch.manual_seed(1)
    network, adapter = adapted(model, algorithm, {"rank_dropout": rate})
    adapter.eval()
    assert torch.allclose(network(inputs), model(inputs), atol=1e-5), algorithm
    adapter.train()
    with torch.no_grad():
        changes = torch.stack([(network(inputs) - model(inputs)).norm() for _ in range(TIMES)])
        weights = torch.cat([adapter.loras[0].get_merged_weight()[0] for _ in range(TIMES)])
    change = (changes.mean() / model(inputs).norm()).item()
    rows = weights.norm(dim=1) / model[0].weight.norm(dim=1).repeat(TIMES)
    zero = (rows == 0).float().mean().item()
    others = rows[rows != 0]
    label = f"{algorithm}, {rate}"
    print(f"  {label:18} {change:9.3f} {zero:10.2f} {others.mean().item():7.2f}")
    if algorithm == "diag-oft":
        assert change > 3 * rate**2 and abs(zero - rate) < 0.01, label
        assert torch.allclose(others, torch.tensor(1 / (1 - rate)), atol=1e-4), label
    else:
        assert change < 1e-5 and zero == 0, label

print("nothing to learn      training   after")
for algorithm, rate in (("lokr", 0.1), ("full", 0.1), ("diag-oft", 0.02), ("diag-oft", 0.1), ("diag-oft", 0.5)):
    last, after, _ = trained(model, model, algorithm, {"rank_dropout": rate})
    label = f"{algorithm}, {rate}"
    print(f"  {label:18} {last:9.4f} {after:7.4f}")
    assert (last > after > 2e-4) if algorithm == "diag-oft" else (after < 1e-6), label

print("turned weights              after  merged")
for algorithm, bypass, bias in (
    ("diag-oft", False, True),
    ("diag-oft", True, True),
    ("diag-oft", True, False),
    ("boft", False, True),
    ("boft", True, True),
    ("boft", True, False),
):
    own = make_model(bias)
    results = trained(own, turned(own), algorithm, {"bypass_mode": bypass})
    label = f"{algorithm}{', bypass' if bypass else ''}{'' if bias else ', no bias'}"
    print(f"  {label:25} {results[1]:.4f}  {results[2]:.4f}")
    if bypass and bias:
        assert results[2] > 1.5 * results[1], label
    else:
        assert abs(results[2] - results[1]) < 1e-5, label
    if algorithm == "boft" and not bypass:
        assert trained(own, turned(make_model(bias)), algorithm, {"rank_dropout": 0.5}) == results, label
PY
