#!/usr/bin/env bash
# trl 1.16.0, Python 3.11: in DPO with the alpha-divergence, alpha works as 1 - alpha
#
# Valid input: DPOTrainer with f_divergence_type="alpha_divergence" and f_alpha_divergence_coef from 0.001 to 1. This is
# the "coefficient for the α-divergence u^-α regularizer", says the documentation, which names the f-DPO paper.
#
# Expected: f-DPO (Wang and others, 2023): a response with the ratio u of the policy to the reference has the reward
# beta * (1 - u^-alpha) / alpha. Towards alpha 0 this is log u: the reverse KL, plain DPO. At alpha 1 it is 1 - 1/u: the
# forward KL. The trainer has both as f_divergence_type, so these two ends can be compared within it.
#
# Seen: the trainer uses u^(alpha - 1), so it has 1 - alpha in each place of alpha: with 0.001 the loss is that of the
# forward KL, and with 0.999 and 1 that of plain DPO. All values but the default, 0.5, train another objective.
#
# Why it matters: alpha is the dial between the two. Who takes 0.1 to stay near plain DPO gets almost the forward KL,
# whose rewards cannot exceed beta, so that a chosen response soon gains nothing more, and whose losses are others. A
# search over alpha comes out reversed against the paper, and 0.5, the only value that is right, shows nothing.
#
# Output (losses of one and the same policy and data):
# reverse_kl   0.0050
# forward_kl   0.4984
#   alpha   by the paper   alpha_divergence
#   0.001         0.0052             0.4983
#   0.100         0.0585             0.4915
#   0.300         0.2823             0.4664
#   0.500         0.4106             0.4106
#   0.700         0.4664             0.2823
#   0.900         0.4915             0.0585
#   0.999         0.4983             0.0052
#   1.000         0.4984             0.0050
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet trl==1.16.0 transformers==5.24.0 accelerate==1.15.0 torch==2.13.0 numpy==2.4.6 \
    || exit 2
cd "$work"
export HF_HOME="$work/home" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=""
"$work/venv/bin/python" - <<'PY'
import contextlib
import copy
import io
import logging
import warnings

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)

import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

disable_progress_bars()
BETA = 0.5
WORDS = ["<pad>", "<eos>", *(f"w{number}" for number in range(30))]
tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")

torch.manual_seed(0)
REFERENCE = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
)
TEXTS = [[" ".join(f"w{int(word)}" for word in torch.randint(0, 30, (4,))) for _ in range(3)] for _ in range(8)]
DATA = Dataset.from_list([{"prompt": a, "chosen": " " + b, "rejected": " " + c} for a, b, c in TEXTS])


def log_probability(model: torch.nn.Module, prompt: str, completion: str) -> torch.Tensor:
    words = [*prompt.split(), *completion.split(), "<eos>"]
    tokens = torch.tensor([[WORDS.index(word) for word in words]])
    logits = model(input_ids=tokens).logits[0, :-1].log_softmax(-1)
    each = logits.gather(1, tokens[0, 1:, None])[:, 0]
    return each[len(prompt.split()) - 1 :].sum()


def log_ratios() -> torch.Tensor:
    """For the chosen and the rejected completions, the logarithms of policy through reference."""
    rows = []
    for key in ("chosen", "rejected"):
        policy, reference = (
            torch.stack([log_probability(model, row["prompt"], row[key]) for row in DATA])
            for model in (POLICY, REFERENCE)
        )
        rows.append(policy - reference)
    return torch.stack(rows)


POLICY = copy.deepcopy(REFERENCE)  # and then trained a little on the chosen completions
optimizer = torch.optim.AdamW(POLICY.parameters(), lr=0.001)
for _ in range(12):
    optimizer.zero_grad()
    (-sum(log_probability(POLICY, row["prompt"], row["chosen"]) for row in DATA) / len(DATA)).backward()
    optimizer.step()
POLICY.zero_grad()


def by_trainer(kind: str, alpha: float = 0.5) -> float:
    config = DPOConfig(
        output_dir="out",
        beta=BETA,
        f_divergence_type=kind,
        f_alpha_divergence_coef=alpha,
        per_device_eval_batch_size=8,
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trainer = DPOTrainer(
            model=copy.deepcopy(POLICY),
            ref_model=copy.deepcopy(REFERENCE),
            args=config,
            train_dataset=DATA,
            eval_dataset=DATA,
            processing_class=TOKENIZER,
        )
        return trainer.evaluate()["eval_loss"]


def by_paper(alpha: float) -> float:
    with torch.no_grad():
        chosen, rejected = (1 - torch.exp(-alpha * log_ratios())) / alpha
    return float(-torch.nn.functional.logsigmoid(BETA * (chosen - rejected)).mean())


with torch.no_grad():
    ratios = log_ratios()
    plain = float(-torch.nn.functional.logsigmoid(BETA * (ratios[0] - ratios[1])).mean())
reverse, forward = by_trainer("reverse_kl"), by_trainer("forward_kl")
print(f"reverse_kl   {reverse:.4f}")
print(f"forward_kl   {forward:.4f}")
assert abs(reverse - plain) < 1e-3 and abs(by_paper(0.0001) - reverse) < 1e-3
assert abs(by_paper(1.0) - forward) < 1e-3 and abs(reverse - forward) > 0.05
print("  alpha   by the paper   alpha_divergence")
for alpha in (0.001, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999, 1.0):
    right, seen = by_paper(alpha), by_trainer("alpha_divergence", alpha)
    print(f"{alpha:7.3f}{right:15.4f}{seen:19.4f}")
    assert abs(seen - (by_paper(1 - alpha) if alpha < 1 else reverse)) < 1e-3
    assert alpha == 0.5 or abs(seen - right) > 0.02
PY
