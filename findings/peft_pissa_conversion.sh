#!/usr/bin/env bash
# peft 0.21.2, Python 3.11: converting an adapter of PiSSA or OLoRA to plain LoRA throws away the magnitudes of DoRA
#
# Valid input: the documented way to turn an adapter that began with PiSSA or OLoRA into one for the unchanged model:
# save it before the training, then call save_pretrained with path_initial_model_for_weight_conversion. All with
# use_dora=True, which LoraConfig takes together with both. The docstring excludes rslora with rank or alpha patterns,
# and nothing else.
#
# Expected: the saved adapter, loaded on the base model, is the trained model. So it is without DoRA.
#
# Seen: the conversion makes a new set of tensors out of the names with "lora_A" and "lora_B". The trained magnitudes
# (lora_magnitude_vector) are in no file any more, while the saved configuration still says use_dora. Saving does not
# warn. Loading puts the norms of the base weights in their place, and warns that keys are missing; by then the training
# is over.
#
# Why it matters: the converted adapter is the one that is kept and published, as it needs no change of the base model.
# It works, because the directions are there, and most of the training with them: only a loss before and after saving
# shows what is missing. Save the adapter without the conversion too, or look for lora_magnitude_vector in the file.
#
# Output (losses of a small model, and the tensors that the converted file lacks):
#                       before   trained converted  difference, tensors lost
#   pissa plain          4.757     1.086     1.086    -0.000  []
#   olora plain          4.757     1.059     1.059    +0.000  []
#   pissa DoRA           4.757     1.137     1.883    +0.745  ['lora_magnitude_vector']
#   olora DoRA           4.757     1.044     1.793    +0.749  ['lora_magnitude_vector']
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet peft==0.21.2 transformers==5.24.0 accelerate==1.15.0 torch==2.13.0 numpy==2.4.6 \
    || exit 2
OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 "$work/venv/bin/python" - "$work" <<'PY'
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

WORK = Path(sys.argv[1])
torch.manual_seed(0)
TOKENS = torch.randint(0, 64, (8, 16))


def base() -> LlamaForCausalLM:
    """A small language model with the same random weights each time."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def loss(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=TOKENS, labels=TOKENS).loss


def measured(label: str, init: str, **options) -> tuple[float, float, float, set[str]]:
    """The loss before the training, after it, and after the conversion, and the names of the tensors that are lost."""
    folder = WORK / label.replace(" ", "_")
    config = LoraConfig(r=4, lora_alpha=8, init_lora_weights=init, task_type="CAUSAL_LM", **options)
    model = get_peft_model(base(), config)
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(folder / "before")
    model.peft_config["default"].init_lora_weights = init
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    model.save_pretrained(folder / "usual")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.save_pretrained(folder / "converted", path_initial_model_for_weight_conversion=folder / "before")
    assert not any("magnitude" in str(warning.message) for warning in caught)
    converted = PeftModel.from_pretrained(base(), folder / "converted")
    with torch.no_grad():
        losses = [float(loss(part)) for part in (base(), model, converted)]
    names = [set(load_file(folder / kind / "adapter_model.safetensors")) for kind in ("usual", "converted")]
    lost = {name.split(".")[-1] for name in names[0] - names[1]}
    cells = "".join(f"{value:10.3f}" for value in losses)
    print(f"{label:17}{cells}{losses[2] - losses[1]:+10.3f}  {sorted(lost)}")
    return *losses, lost


print("                    before   trained converted  difference, tensors lost")
LAYERS = ["q_proj", "v_proj", "down_proj"]
plain = [measured(f"{init} plain", init, target_modules=LAYERS) for init in ("pissa", "olora")]
dora = [measured(f"{init} DoRA", init, target_modules=LAYERS, use_dora=True) for init in ("pissa", "olora")]
for _, trained, converted, lost in plain:
    assert abs(converted - trained) < 1e-3
    assert not lost
for _, trained, converted, lost in dora:
    assert converted - trained > 0.1
    assert lost == {"lora_magnitude_vector"}
PY
