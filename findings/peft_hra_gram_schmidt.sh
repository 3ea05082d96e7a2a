#!/usr/bin/env bash
# peft 0.21.2, Python 3.11: HRA with apply_GS=True breaks the model before the first step, and it does not train
#
# Valid input: HRAConfig(apply_GS=True) with an even rank and the default init_weights=True. The docstring says of the
# option only that Gram-Schmidt orthogonalization is applied, and of the rank that an even one is best, because the
# default initialization does not work with an odd one.
#
# Expected: a fresh adapter leaves the model as it is, as HRA does without the option; and it trains about as well.
#
# Seen: the fresh adapter changes the model, and after 60 steps of training the loss is still 5.96, where it is 1.19
# without the option. The default initialization makes the vectors in equal pairs, because two equal reflections cancel
# each other. Gram-Schmidt subtracts from each vector its share of the earlier ones: of the second of a pair only
# rounding errors are left, and they are divided by their length. Half of the directions are noise, which is another one
# in float64, and the gradients go through a division by almost zero. Nothing is raised, and there is no warning.
#
# Why it matters: the loss is finite, so that it looks like a bad learning rate or a method that does not work.
# init_weights=False trains with the option, as the fourth line shows; there the fresh model is changed too, which no
# docstring says, and the help of init_weights tells you not to touch it.
#
# Output (losses of a small model on texts that it knows, and on new ones after training on those):
#                                  old texts, fresh   new texts, trained
# base model                                  0.017
# default                                     0.017                1.193
# apply_GS=True                               0.690                5.964
# apply_GS=True, init_weights=False           0.159                0.836
# rotation of a fresh layer: 7.93 from the identity; the same vectors in float64: 4.32 from float32
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet peft==0.21.2 transformers==5.24.0 accelerate==1.15.0 torch==2.13.0 numpy==2.4.6 \
    || exit 2
OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 "$work/venv/bin/python" - <<'PY'
import copy
import warnings

warnings.simplefilter("ignore")

import torch
from peft import HRAConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

RANK = 8
torch.manual_seed(0)
OLD, NEW = torch.randint(0, 64, (2, 8, 16))  # the texts of the base model, and those of the fine-tuning


def loss(model: torch.nn.Module, texts: torch.Tensor) -> torch.Tensor:
    return model(input_ids=texts, labels=texts).loss


def train(model: torch.nn.Module, texts: torch.Tensor, rate: float, steps: int) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model, texts).backward()
        optimizer.step()


def hra(**options) -> torch.nn.Module:
    torch.manual_seed(2)
    config = HRAConfig(r=RANK, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"], **options)
    return get_peft_model(copy.deepcopy(base), config)


torch.manual_seed(1)
base = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
)
train(base, OLD, rate=0.005, steps=60)
before = float(loss(base, OLD).detach())
print("                                 old texts, fresh   new texts, trained")
print(f"base model                       {before:16.3f}")
cases = [{}, {"apply_GS": True}, {"apply_GS": True, "init_weights": False}]
results = []
for options in cases:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = hra(**options)
        fresh = float(loss(model, OLD).detach())
    others = [str(warning.message) for warning in caught if warning.category is not FutureWarning]
    assert not others, others
    train(model, NEW, rate=0.01, steps=60)
    results.append((fresh, float(loss(model, NEW).detach())))
    name = ", ".join(f"{key}={value}" for key, value in options.items()) or "default"
    print(f"{name:33} {results[-1][0]:15.3f} {results[-1][1]:20.3f}")

layer = hra(apply_GS=True).base_model.model.model.layers[0].self_attn.q_proj
vectors = layer.hra_u["default"]
assert torch.equal(vectors[:, 0::2], vectors[:, 1::2])  # each vector is there twice
narrow = layer.get_delta_weight("default").detach()
vectors.data = vectors.data.double()
wide = layer.get_delta_weight("default").detach()
far, moved = float((narrow - torch.eye(64)).norm()), float((wide - narrow).norm())
print(f"rotation of a fresh layer: {far:.2f} from the identity; the same vectors in float64: {moved:.2f} from float32")
assert abs(results[0][0] - before) < 1e-3 and results[1][0] > before + 0.3
assert results[1][1] > results[0][1] + 1 and results[1][1] > results[2][1] + 1
assert far > 3 and moved > 1
PY
