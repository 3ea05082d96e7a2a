"""Prints the page docs/models.md: supported models, and which of them fit into 4 GB by r3lite's memory plans.

    python -m bench.models > docs/models.md

Nothing is run: the plans are those of `python -m r3lite.plan`. A test fails if the page differs from what this prints.
"""

from bench import records
from bench.cards import planned
from r3lite.devices.live_tensors import MIB
from r3lite.memory.known_models import INSTRUCT

CARD = "RTX 3050 Laptop"
SFT = ["--max-length", "1024"]
GRPO = ["--algorithm", "grpo", "--adapter", "runs/sft"]
LEFT_OUT = ("R1-Distill", "TinyLlama")  # R1 distills are as large as other models in the table; TinyLlama is old
PAGE = """\
# Models

`--model` takes a folder in the transformers layout, a hub id, a GGUF file, or `tiny`. Supported families:

| `model_type` | families |
|---|---|
| `qwen2` | Qwen2, Qwen2.5, R1 distills of them |
| `qwen3` | Qwen3 (dense) |
| `llama` | Llama 1 to 3.3, SmolLM2, TinyLlama, R1 distills of Llama |
| `mistral` | Mistral |
| `granite`, `granitemoehybrid` | Granite 3; Granite 4 without experts and Mamba layers |
| `smollm3` | SmolLM3 |
| `gemma3_text`, `gemma3` | Gemma 3, its text part |
| `qwen3_5_text`, `qwen3_5` | Qwen3.5 (dense), its text part |
| `lfm2` | LFM2, LFM2.5 (dense, text) |

**Verified:** with random weights of two sizes, the logits of each family equal those of transformers within 1e-4 in
fp32 (`pytest tests/models/test_families.py`). The only real weights tested are
Qwen2.5-Coder-0.5B-Instruct, SmolLM2-135M-Instruct and Gemma 3 270M.

Mistral without `sliding_window` in `config.json` has a window of 4,096; only `null` means none. Granite 4 has gate and
up projections in one matrix, with one adapter. LFM2's convolutions and Qwen3.5's linear attention count as attention in
`--lora-targets`: `in_proj` and `in_proj_qkv` as `q_proj`, `k_proj` and `v_proj`, `in_proj_z` as `q_proj`, `in_proj_b`
as `v_proj`, `in_proj_a` as `k_proj`, `out_proj` as `o_proj`. Qwen3.5 samples without CUDA graphs.

## What fits into 4 GB

Planned peak in MiB on a GPU with 4 GB: SFT with rows of 1,024 tokens, GRPO with 64 episodes of 4,096. In parentheses:
layers recomputed in the backward pass, of all. * means with `--stream-layers`, "offload": layer inputs on the host.

{table}

## Chat templates

The chat template in the model folder is used. If r3lite cannot build its tokens, it stops and shows both texts.
Templates of these families, R1 and Phi-3 are tested against transformers. If a template has no system role, the system
message is put before the first user message. Templates that insert today's date get a fixed one, which exports keep.
Where transformers 5 does not follow `tokenizer.json` (for `qwen2` it splits by a rule of its own), r3lite warns and
follows the file. A template runs in its own process, with at most 20 seconds and 1 GiB for a chat (on Windows and macOS
time is the only limit).

**Thinking models:** Qwen3 and 3.5 do not think by default; `--thinking on` changes that. R1 distills always think; SFT
on demonstrations without thoughts teaches them to leave the thought empty. Where the template removes the thoughts of
earlier replies, SFT trains each of these replies in a row of its own, and `serve` removes them. The steps of an episode
keep theirs, because an episode is one growing sequence; a program that renders it with the template removes them.
LFM2.5's template keeps the thought of the last earlier reply only; SFT rows keep all.

## Quantized files

- `--model FILE.gguf` (extra `gguf`): Q4_0 to Q8_0, K-quants, F16, BF16 and F32 of qwen2, qwen3, gemma3 and
  byte-level llama files. Tokenizer and config are cached in `~/.cache/r3lite`. An adapter works only with the file that
  it was trained on.
- NF4 folders of bitsandbytes (`*-bnb-4bit`), also with some dense layers.
"""


def cell(model: str, flags: list[str], quantize: str) -> str:
    """Returns the cell of a run: its planned peak in MiB and its recomputed layers, or "no" if it does not fit.

    With streamed layers, the peak has an asterisk instead of the recomputed layers.
    """
    flags = ["--card", CARD, "--model", model, "--quantize", quantize, *flags]
    plan = planned(flags)
    if plan is None:
        plan = planned([*flags, "--stream-layers"])
    if plan is None:
        return "no"
    memory = plan.memory
    peak = f"{plan.peak / MIB:,.0f}"
    if memory.stream_layers:
        return f"{peak}* (offload)" if memory.offload else f"{peak}*"
    offload = ", offload" if memory.offload else ""
    return f"{peak} ({memory.recompute_layers}/{plan.workload.model.num_hidden_layers}{offload})"


def page() -> str:
    """Returns the text of docs/models.md."""
    rows = []
    for model in INSTRUCT:
        if any(name in model for name in LEFT_OUT):
            continue
        row = {"model": model.partition("/")[2]}
        for name, flags in (("SFT", SFT), ("GRPO", GRPO)):
            row[f"{name}, bf16"] = cell(model, flags, quantize="none")
            row[f"{name}, NF4"] = cell(model, flags, quantize="nf4")
        rows.append(row)
    return PAGE.format(table=records.table(rows))


if __name__ == "__main__":
    print(page(), end="")
