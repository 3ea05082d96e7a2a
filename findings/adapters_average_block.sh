#!/usr/bin/env bash
# adapters 1.3.0, Python 3.11: the Average block divides by the number of adapters twice
#
# Valid input: set_active_adapters(Average("a", "b")), the block that averages the outputs of adapters. By default, it
# scales its weights so that their sum is 1. Here all adapters are copies of one, in a small BERT with random weights.
#
# Expected: the average of copies is the adapter itself.
#
# Seen: the outputs are multiplied by the weights, and then their mean is taken, not their sum. With two adapters all is
# halved, with three it is a third. Bottleneck adapters (seq_bn and others) include the residual connection: here the
# hidden states themselves shrink, in every layer, and the result is farther from the adapter than a model without it.
# There is no warning. Weights of 1 that are not normalized give the right average; average_adapter, which averages the
# weights instead of the outputs, is right too.
#
# Why it matters: an ensemble of adapters can be worse than each of them, as if they did not go together. With LoRA the
# changes of the adapters are just smaller, which looks plausible; the more adapters, the less is left of them.
#
# Output (distance of the outputs from those of one adapter, divided by its distance from no adapter):
#                   average of 2    of 3    of 4  of 2, weights of 1  average_adapter
#   LoRA                    0.59    0.75    0.81                0.00             0.00
#   (IA)3                   1.83    2.87    3.37                0.00             0.00
#   seq_bn                  1.20    1.94    2.42                0.00             0.00
#   double_seq_bn           1.05    1.64    1.95                0.00             0.00
#   par_bn                  0.31    0.49    0.61                0.00             0.00
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet adapters==1.3.0 transformers==4.57.6 torch==2.13.0 numpy==2.4.6 || exit 2
OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 "$work/venv/bin/python" -W ignore - <<'PY'
import logging

import adapters
import torch
from adapters import DoubleSeqBnConfig, IA3Config, LoRAConfig, ParBnConfig, SeqBnConfig
from adapters.composition import Average
from transformers import BertConfig, BertModel

torch.set_num_threads(1)
logging.disable(logging.WARNING)  # that no adapter is active, which is so on purpose
torch.manual_seed(0)
words = torch.randint(0, 100, (8, 16))


def model_with_copies(config, names):
    """A model with copies of one adapter, which is as if trained: its weights are not those of the start."""
    torch.manual_seed(1)
    model = BertModel(
        BertConfig(
            vocab_size=100,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            initializer_range=0.2,
        )
    ).eval()
    adapters.init(model)
    for name in names:
        model.add_adapter(name, config)
    parameters = dict(model.named_parameters())
    torch.manual_seed(2)
    with torch.no_grad():
        for key, parameter in parameters.items():
            if f".{names[0]}." in key:
                parameter.add_(0.2 * torch.randn_like(parameter))
                for name in names[1:]:
                    parameters[key.replace(f".{names[0]}.", f".{name}.")].copy_(parameter)
    return model


def outputs(model, setup):
    model.set_active_adapters(setup)
    with torch.no_grad():
        return model(words).last_hidden_state


assert sum(Average("a", "b").weights) == 1 and Average("a", "b", weights=[3, 1]).weights == [0.75, 0.25]
print(f"{'':16}average of 2    of 3    of 4  of 2, weights of 1  average_adapter")
for label, config in (
    ("LoRA", LoRAConfig()),
    ("(IA)3", IA3Config()),
    ("seq_bn", SeqBnConfig()),
    ("double_seq_bn", DoubleSeqBnConfig()),
    ("par_bn", ParBnConfig()),
):
    names = ["a", "b", "c", "d"]
    model = model_with_copies(config, names)
    alone = outputs(model, "a")
    assert all(torch.equal(alone, outputs(model, name)) for name in names)
    size = (alone - outputs(model, None)).norm()
    distances = []
    for number in (2, 3, 4):
        distances.append(((outputs(model, Average(*names[:number])) - alone).norm() / size).item())
    ones = Average("a", "b", weights=[1.0, 1.0], normalize_weights=False)
    unnormalized = ((outputs(model, ones) - alone).norm() / size).item()
    model.average_adapter("merged", ["a", "b"])
    merged = ((outputs(model, "merged") - alone).norm() / size).item()
    two, three, four = distances
    print(f"{label:15} {two:12.2f} {three:7.2f} {four:7.2f} {unnormalized:19.2f} {merged:16.2f}")
    assert 0.2 < two < three < four, (label, distances)
    assert unnormalized < 1e-4 and merged < 1e-4, label
PY
