#!/usr/bin/env bash
# torchtune 0.6.1, Python 3.11: with DoRA, layers that have a bias train one model, and a merge gives another
#
# Valid input: DoRA by `lora_qwen2(..., use_dora=True)` on a small Qwen2, of which the layers q, k and v have a bias.
# It is trained, merged with `get_merged_lora_ckpt` and loaded into `qwen2`. Also one layer that can be checked by hand.
#
# Expected: the merged model computes what the model with the adapter does. DoRA (2024) gives new lengths to the rows of
# the weights; a bias is not a part of them. peft takes the bias out before it scales the output of a layer.
#
# Seen: in training the factor of a row, magnitude / length, multiplies the whole output of the layer, with its bias:
# below, 2 * (7 + 10) instead of 2 * 7 + 10. The merge scales the weights and leaves the bias, as in the paper. So the
# merged model is not the one that was trained. It is if the bias is scaled by hand, in the last column. LoRA is right,
# and so is DoRA on layers without a bias. There is no warning. With magnitudes as at the start there is no difference.
#
# Why it matters: q, k and v of Qwen2 and Qwen2.5 have a bias, and they are what adapters usually go to. What is merged,
# exported and evaluated has lost a part of what was learned; the validation loss during training shows nothing of it.
#
# Output (the two outputs of one layer; loss before training, with the trained adapter, merged, and merged with the bias
# of each layer scaled by hand):
#   one layer: output of the adapter, and merged
#        34.0   15.0
#        24.0   15.0
#   a model                    before  trained   merged   merged, bias scaled
#     LoRA on q, k, v           3.614    2.721    2.721    2.721
#     DoRA without a bias       3.614    2.667    2.667    2.667
#     DoRA on q, k, v           3.614    2.966    3.173    2.966
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
# torchao 0.10.0 is of the time of torchtune 0.6.1, which imports what later releases of torchao have moved.
packages="torch==2.13.0 numpy==2.4.6 torchao==0.10.0 datasets==5.2.0 torchtune==0.6.1"
"$work/venv/bin/pip" install --quiet $packages || exit 2
OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 "$work/venv/bin/python" - 2>"$work/log" <<'PY' || { cat "$work/log"; exit 1; }
import copy

import torch
from torchtune.models.qwen2 import lora_qwen2, qwen2
from torchtune.modules.peft import DoRALinear, get_adapter_params, get_merged_lora_ckpt, set_trainable_params

RANK = 4
ALPHA = 8
STEPS = 60
SIZES = dict(
    vocab_size=32, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=32, intermediate_dim=64, max_seq_len=16
)
torch.set_num_threads(1)

# One layer, by hand: weights of the lengths 5 and 5, of which the magnitudes make 10 and 5; the low-rank part is 0.
layer = torch.nn.Sequential(DoRALinear(2, 2, rank=1, alpha=1, use_bias=True))
with torch.no_grad():
    layer[0].weight.copy_(torch.tensor([[3.0, 4.0], [0.0, 5.0]]))
    layer[0].bias.fill_(10.0)
    layer[0].magnitude.copy_(torch.tensor([10.0, 5.0]))
    merged = get_merged_lora_ckpt(copy.deepcopy(layer.state_dict()), rank=1, alpha=1)
    inputs = torch.ones(1, 2)
    outputs = layer(inputs)
    after = torch.nn.functional.linear(inputs, merged["0.weight"], merged["0.bias"])
print("one layer: output of the adapter, and merged")
for values in (outputs, after):
    print("  " + "".join(f"{value:7.1f}" for value in values[0]))
assert torch.allclose(after, torch.tensor([2 * 7.0 + 10, 15.0]))
assert torch.allclose(outputs, torch.tensor([2 * (7.0 + 10), 15.0]))

torch.manual_seed(0)
base = qwen2(**SIZES)
with torch.no_grad():
    for name, parameter in base.named_parameters():
        if name.endswith("bias"):
            parameter.normal_()
tokens = torch.randint(0, 32, (32, 16))


def loss(model):
    logits = model(tokens[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


print(f"{'a model':26} before  trained   merged   merged, bias scaled")
for label, attention, use_dora, right in (
    ("LoRA on q, k, v", ["q_proj", "k_proj", "v_proj"], False, True),
    ("DoRA without a bias", ["output_proj"], True, True),
    ("DoRA on q, k, v", ["q_proj", "k_proj", "v_proj"], True, False),
):
    torch.manual_seed(1)
    options = dict(lora_rank=RANK, lora_alpha=ALPHA, use_dora=use_dora, **SIZES)
    model = lora_qwen2(attention, apply_lora_to_mlp="output_proj" in attention, **options)
    model.load_state_dict(base.state_dict(), strict=False)
    for module in model.modules():
        if isinstance(module, DoRALinear):
            module.initialize_dora_magnitude()
    set_trainable_params(model, get_adapter_params(model))
    losses = [loss(model).item()]
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    merged, scaled = qwen2(**SIZES), qwen2(**SIZES)
    state = get_merged_lora_ckpt(copy.deepcopy(model.state_dict()), rank=RANK, alpha=ALPHA)
    merged.load_state_dict(state)
    # The bias of each layer times its magnitudes, divided by the lengths of its weights, as the forward pass has it.
    for name, module in model.named_modules():
        if isinstance(module, DoRALinear) and module.bias is not None:
            change = ALPHA / RANK * module.lora_b.weight @ module.lora_a.weight
            factor = module.magnitude / (module.weight + change).norm(dim=1)
            state[f"{name}.bias"] = (module.bias * factor).detach()
    scaled.load_state_dict(state)
    with torch.no_grad():
        losses += [loss(network).item() for network in (model, merged, scaled)]
        logits = [network(tokens) for network in (model, merged, scaled)]
    print(f"  {label:22}" + "".join(f"{value:9.3f}" for value in losses))
    assert abs(losses[0] - loss(base).item()) < 1e-3
    assert torch.allclose(logits[0], logits[2], atol=1e-3), label
    assert torch.allclose(logits[0], logits[1], atol=1e-3) == right, label
    assert right or losses[2] > losses[1] + 0.1, label
PY
