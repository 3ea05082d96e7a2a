#!/usr/bin/env bash
# adapters 1.3.0, Python 3.11: merging a DoRA adapter gives another model, and reset_adapter does not take it out
#
# Valid input: merge_adapter, which puts an adapter into the weights of the model, and reset_adapter, which takes it out
# again. Two small models with random weights: BERT, whose linear layers have biases, and Llama, whose have none.
#
# Expected: the merged model gives the outputs of the model with the adapter, and after reset_adapter the model without
# an adapter gives what it gave at first. So it is with LoRA and VeRA.
#
# Seen: for DoRA, merging leaves out the factor alpha / r, and the unmerged adapter leaves it out in the norm that it
# divides by. reset_adapter computes the weights as they were, but does not store them: the model stays changed, and
# with the adapter active it is applied twice. With biases DoRA differs even at alpha = r, and so does (IA)3, since the
# unmerged adapters scale the biases and merging does not. There is no warning.
#
# Why it matters: what is evaluated before merging is not what is deployed. To merge and reset, as one does to compare
# adapters on one base model, spoils that model for all that follows.
#
# Output (distance between the outputs with and without the adapter; distance of the merged model from the unmerged one;
# after the reset, distance with the adapter from the unmerged model, and without it from the model at first; the last
# three are divided by the first):
#                           adapter   merged    reset: with  without
#   BERT   LoRA, alpha=16     38.77     0.00           0.00     0.00
#   BERT   VeRA               39.17     0.00           0.00     0.00
#   BERT   (IA)3              18.07     0.11           0.00     0.00
#   BERT   DoRA               25.96     0.04           0.90     0.99
#   BERT   DoRA, alpha=16     46.63     0.51           0.45     0.55
#   Llama  LoRA, alpha=16     74.69     0.00           0.00     0.00
#   Llama  VeRA               76.74     0.00           0.00     0.00
#   Llama  (IA)3              27.32     0.00           0.00     0.00
#   Llama  DoRA               46.82     0.00           0.88     1.00
#   Llama  DoRA, alpha=16     73.69     0.57           0.55     0.64
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet adapters==1.3.0 transformers==4.57.6 torch==2.13.0 numpy==2.4.6 || exit 2
OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 "$work/venv/bin/python" -W ignore - <<'PY'
import logging

import adapters
import torch
from adapters import DoRAConfig, IA3Config, LoRAConfig, VeraConfig
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "initializer_range": 0.2,
}
torch.set_num_threads(1)
logging.disable(logging.WARNING)  # that no adapter is active, which is so on purpose
torch.manual_seed(0)
words = torch.randint(0, 100, (8, 16))


def add_noise(parameters, size, seed):
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(size * torch.randn_like(parameter))


def bert():
    torch.manual_seed(1)
    model = BertModel(BertConfig(**SIZES)).eval()
    add_noise([p for n, p in model.named_parameters() if n.endswith("bias")], 0.2, 2)
    return model


def llama():
    torch.manual_seed(1)
    return LlamaModel(LlamaConfig(**SIZES)).eval()


def outputs(model):
    with torch.no_grad():
        return model(words).last_hidden_state


print(f"{'':23} adapter   merged    reset: with  without")
for base, make in (("BERT", bert), ("Llama", llama)):
    for label, config in (
        ("LoRA, alpha=16", LoRAConfig(alpha=16)),
        ("VeRA", VeraConfig()),
        ("(IA)3", IA3Config()),
        ("DoRA", DoRAConfig()),
        ("DoRA, alpha=16", DoRAConfig(alpha=16)),
    ):
        model = make()
        adapters.init(model)
        before = outputs(model)
        model.add_adapter("task", config)
        add_noise([p for n, p in model.named_parameters() if ".task." in n], 0.1, 3)
        model.set_active_adapters("task")
        adapted = outputs(model)
        size = (adapted - before).norm().item()
        model.merge_adapter("task")
        merged = (outputs(model) - adapted).norm().item() / size
        model.reset_adapter()
        active = (outputs(model) - adapted).norm().item() / size
        model.set_active_adapters(None)
        inactive = (outputs(model) - before).norm().item() / size
        print(f"{base:6} {label:15} {size:8.2f} {merged:8.2f} {active:14.2f} {inactive:8.2f}")
        differs = label == "DoRA, alpha=16" or (base == "BERT" and label in ("(IA)3", "DoRA"))
        assert merged > 0.03 if differs else merged < 1e-4, (base, label)
        if label.startswith("DoRA"):
            assert active > 0.3 and inactive > 0.3, (base, label)
        else:
            assert active < 1e-4 and inactive < 1e-4, (base, label)
PY
