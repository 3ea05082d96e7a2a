#!/usr/bin/env bash
# peft 0.21.2, Python 3.11: add_weighted_adapter makes the result of rsLoRA adapters sqrt(rank) times too strong
#
# Valid input: add_weighted_adapter with adapters of use_rslora=True: here one adapter with weight 1. The docstring says
# that "cat" and "svd" are precise, and excludes no kind of LoRA.
#
# Expected: one adapter with weight 1 is the same adapter under a new name. So it is without rsLoRA.
#
# Seen: with use_rslora the copy changes the weights sqrt(rank) times as much, with "cat", "svd" and "linear" alike. The
# scales of the sources are already in the new matrices, so the new configuration gets lora_alpha = r to have scale 1;
# but use_rslora is taken over from the first adapter, and then the scale is r / sqrt(r). There is no warning. (With
# use_dora or lora_bias, one adapter with weight 1 does not come back either.) Reported as huggingface/peft issue 3761.
#
# Why it matters: rsLoRA is meant for large ranks, where the error is largest: 8 times at rank 64. The mixed adapter
# loads and runs, and looks like proof that the adapters cannot be combined, or that their weights must be tiny. Weights
# divided by sqrt(r of the new adapter) give the right one; so does use_rslora=False in its saved configuration.
#
# Output (losses of a small model before the training, after it, and of the copy; the size of the copy's change of a
# weight matrix, in times of the adapter's):
#          rank     start   trained      copy     times
# LoRA        4     4.757     1.598     1.598      1.00
# LoRA       16     4.757     1.105     1.105      1.00
# rsLoRA      4     4.757     1.319     3.207      2.00
# rsLoRA     16     4.757     0.522     4.293      4.00
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet peft==0.21.2 transformers==5.24.0 accelerate==1.15.0 torch==2.13.0 numpy==2.4.6 \
    || exit 2
OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 "$work/venv/bin/python" - <<'PY'
import warnings

warnings.simplefilter("ignore")

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
TOKENS = torch.randint(0, 64, (8, 16))


def loss(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=TOKENS, labels=TOKENS).loss


def measured(rank: int, use_rslora: bool) -> tuple[float, float, float]:
    """The losses of the trained adapter and of its copy, and how many times larger the change of the weights is."""
    torch.manual_seed(1)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            tie_word_embeddings=False,
            initializer_range=0.2,
        )
    )
    layers = ["q_proj", "v_proj", "down_proj"]
    config = LoraConfig(r=rank, lora_alpha=8, target_modules=layers, use_rslora=use_rslora, task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    start = float(loss(model).detach())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.005)
    for _ in range(60):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    trained = float(loss(model).detach())
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        copies = []
        for kind in ("cat", "svd", "linear"):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model.add_weighted_adapter(["default"], [1.0], kind, combination_type=kind)
            assert not any("rslora" in str(w.message) or "scal" in str(w.message) for w in caught), caught
            model.set_adapter(kind)
            change = layer.get_delta_weight(kind).norm() / layer.get_delta_weight("default").norm()
            copies.append((float(loss(model)), float(change)))
    for copied, change in copies:
        assert abs(copied - copies[0][0]) < 0.01 and abs(change - copies[0][1]) < 0.01, copies
    label = "rsLoRA" if use_rslora else "LoRA"
    print(f"{label:8} {rank:4} {start:9.3f} {trained:9.3f} {copies[0][0]:9.3f} {copies[0][1]:9.2f}")
    return trained, *copies[0]


print("         rank     start   trained      copy     times")
for rank in (4, 16):
    trained, copied, change = measured(rank, use_rslora=False)
    assert abs(copied - trained) < 1e-3 and abs(change - 1) < 1e-3
for rank in (4, 16):
    trained, copied, change = measured(rank, use_rslora=True)
    assert copied - trained > 0.3 and abs(change - rank**0.5) < 0.01
PY
