#!/usr/bin/env bash
# pytorch-optimizer 4.1.0, torch 2.13.0, Python 3.11: nine optimizers ignore weight_decay when it is to be L2
#
# Valid input: an optimizer with weight_decay=0.1 and weight_decouple=False. The docstring of each says of that option:
# "Apply weight decay to parameters instead of adding it to the gradient", so with False the decay is added to the
# gradient, which is L2 regularization, the weight_decay of torch.optim.Adam and SGD.
#
# Expected: the same weights as with weight_decay=0 and 0.1 * w added to the gradient by hand. AdaBelief, Lion, PNM,
# QHAdam and many others do so.
#
# Seen: AdamP, AdamWSN, Grams, LaProp, Prodigy, RAdam, SGDP, SGDSaI and TAM give, to the last bit, the weights of no
# decay at all. They add the decay to the gradient only after the averages of the step have taken the gradient up, and
# the next step has a new one; RAdam gives its decay no gradient to add to. With the default, weight_decouple=True, the
# decay is there. No warning is given.
#
# Why it matters: who compares L2 with decoupled decay, or repeats a paper that has L2, trains without regularization,
# with a setting in the log that says otherwise. Add weight_decay * p to p.grad yourself, or leave the option at True.
# In SignSGD the decay was missing as well (kozistr/pytorch_optimizer, issue 517, closed); 4.1.0 has it there.
#
# Output (norm of the weights of a logistic regression after 300 steps):
#   optimizer    no decay    weight_decay=0.1    0.1 * w added by hand
#   AdaBelief      3.9860              1.1328                   1.1328
#   Lion           4.5017              1.1229                   1.1229
#   PNM            1.8788              1.6507                   1.6507
#   QHAdam         3.0413              1.1328                   1.1328
#   AdamP          3.0421              3.0421                   1.1328
#   AdamWSN        3.0412              3.0412                   1.1328
#   Grams          3.0408              3.0408                   1.1328
#   LaProp         3.0083              3.0083                   1.1328
#   Prodigy        4.4214              4.4214                   1.1328
#   RAdam          1.8144              1.8144                   1.1058
#   SGDP           1.8390              1.8390                   1.4029
#   SGDSaI         1.8971              1.8971                   1.6409
#   TAM            2.7508              2.7508                   1.1341
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet pytorch-optimizer==4.1.0 torch==2.13.0 numpy==2.4.6 || exit 2
"$work/venv/bin/python" - <<'PY'
import torch
import pytorch_optimizer

DECAY = 0.1
CONTROLS = {"AdaBelief": {}, "Lion": {}, "PNM": {}, "QHAdam": {}}
IGNORING = {
    "AdamP": {}, "AdamWSN": {}, "Grams": {}, "LaProp": {}, "Prodigy": {"lr": 1.0}, "RAdam": {}, "SGDP": {},
    "SGDSaI": {}, "TAM": {},
}  # fmt: skip

torch.manual_seed(0)
inputs = torch.randn(64, 16)
labels = (inputs[:, 0] + torch.randn(64) > 0).float()


def trained(optimizer_class, settings, decay, by_hand):
    """The weights of a logistic regression after 300 steps."""
    weights = torch.nn.Parameter(torch.full((1, 16), 0.5))
    optimizer = optimizer_class([weights], weight_decay=decay, weight_decouple=False, **settings)
    for _ in range(300):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(inputs @ weights[0], labels)
        optimizer.zero_grad()
        loss.backward()
        weights.grad += by_hand * weights.detach()
        optimizer.step()
    return weights.detach()


print("optimizer    no decay    weight_decay=0.1    0.1 * w added by hand")
for name, settings in (CONTROLS | IGNORING).items():
    optimizer_class = getattr(pytorch_optimizer, name)
    settings = {"lr": 1e-2} | settings
    without = trained(optimizer_class, settings, 0.0, 0.0)
    option = trained(optimizer_class, settings, DECAY, 0.0)
    by_hand = trained(optimizer_class, settings, 0.0, DECAY)
    print(f"{name:<12}{without.norm():>9.4f}{option.norm():>20.4f}{by_hand.norm():>25.4f}")
    assert (by_hand - without).norm() > 0.01 * without.norm(), name
    if name in IGNORING:
        assert torch.equal(option, without), name
    else:
        assert torch.allclose(option, by_hand, atol=1e-4), name
PY
