#!/usr/bin/env bash
# trl 1.16.0, Python 3.11: GKD divides the loss of generated answers by the length of the dataset's answers
#
# Valid input: GKDTrainer with its default lmbda=0.5: in half of the steps the student is taught on answers that it has
# just generated, in the others on those of the dataset. Here the answers of the dataset have 2, 8 or 32 tokens, and
# max_new_tokens is 32.
#
# Expected: the loss of a step is a mean over its tokens. For lmbda=1 the answers of the dataset are not used at all, so
# their length cannot matter.
#
# Seen: the sum over the tokens of the generated answers is divided by the number of tokens in the dataset's answers.
# The trainer counts them when it loads the batch; only then the batch is replaced. At 2 tokens, loss and gradient are
# 16 times too large. seq_kd=True, where the teacher writes the answers, takes the same way. In DistillationTrainer it
# was mended (huggingface/trl, pull request 6478), in the GKDTrainer of the same release it was not.
#
# Why it matters: an accident of the dataset weighs the two kinds of steps against each other. With short answers nearly
# all that is learned comes from the generated ones, whatever lmbda says, and max_grad_norm clips their steps. The loss
# in the log jumps between two levels, and cannot be compared between datasets or values of max_new_tokens.
#
# Output (loss of a step, the same as a mean over its tokens, the number it is divided by, the number of its tokens):
#                                           loss    mean  divided by  tokens
#   lmbda=1, answers of  2 tokens          6.264   0.392           8     128
#   lmbda=1, answers of  8 tokens          1.566   0.392          32     128
#   lmbda=1, answers of 32 tokens          0.392   0.392         128     128
#   seq_kd,  answers of  2 tokens          6.313   0.395           8     128
#   lmbda=0.5, 2 tokens, step 1: dataset     0.374   0.374           8       8
#   lmbda=0.5, 2 tokens, step 2: dataset     0.387   0.387           8       8
#   lmbda=0.5, 2 tokens, step 3: generated   6.178   0.386           8     128
#   lmbda=0.5, 2 tokens, step 4: generated   6.476   0.405           8     128
#   lmbda=0.5, 2 tokens, step 5: dataset     0.403   0.403           8       8
#   lmbda=0.5, 2 tokens, step 6: generated   6.803   0.425           8     128
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet trl==1.16.0 transformers==5.24.0 accelerate==1.15.0 datasets==5.2.0 \
    pyarrow==26.0.1 torch==2.13.0 numpy==2.4.6 || exit 2
OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TRL_EXPERIMENTAL_SILENCE=1 "$work/venv/bin/python" -W ignore - <<'PY'
import contextlib
import os
import random
import tempfile

import pyarrow
import torch
import transformers
from datasets import Dataset
from datasets.table import InMemoryTable
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.experimental.gkd import GKDConfig, GKDTrainer

BATCH = 4
GENERATED = 32
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
WORDS = [f"w{i}" for i in range(60)]
VOCABULARY = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", "<user>", "<bot>", *WORDS])}
backend = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=128
)
tokenizer.chat_template = (
    "{% for m in messages %}{{ '<user> ' if m.role == 'user' else '<bot> ' }}{{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<bot> {% endif %}"
)


def language_model(seed):
    """A model without an end of text: every answer that it generates has max_new_tokens tokens."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config)


class Watched(GKDTrainer):
    """Writes down the loss of each step, the same as a mean over its tokens, and both numbers of tokens."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        mean = super().compute_loss(model, inputs)
        tokens = int((inputs["labels"] != -100).sum())
        self.seen.append((loss.item(), mean.item(), int(num_items_in_batch), tokens))
        return loss


def steps(answer_length, number, **settings):
    rng = random.Random(0)
    questions = [" ".join(rng.choices(WORDS, k=6)) for _ in range(BATCH * number)]
    rows = []
    for question in questions:
        answer = " ".join(random.Random(question).choices(WORDS, k=answer_length))
        rows.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as null:
        config = GKDConfig(
            output_dir=folder,
            max_steps=number,
            per_device_train_batch_size=BATCH,
            max_new_tokens=GENERATED,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            logging_steps=1,
            seed=3,
            **settings,
        )
        trainer = Watched(
            model=language_model(1),
            teacher_model=language_model(2),
            args=config,
            processing_class=tokenizer,
            # The fingerprint is given: with these versions of dill and pyarrow, it cannot be computed.
            train_dataset=Dataset(InMemoryTable(pyarrow.Table.from_pylist(rows)), fingerprint="rows"),
        )
        trainer.seen = []
        random.seed(0)
        with contextlib.redirect_stdout(null):
            trainer.train()
    for (loss, _, _, _), entry in zip(trainer.seen, trainer.state.log_history, strict=False):
        assert abs(loss - entry["loss"]) < 1e-3 * loss, (loss, entry)
    return trainer.seen


print("                                       loss    mean  divided by  tokens")
for label, length, settings in (
    ("lmbda=1", 2, {"lmbda": 1.0}),
    ("lmbda=1", 8, {"lmbda": 1.0}),
    ("lmbda=1", 32, {"lmbda": 1.0}),
    ("seq_kd", 2, {"lmbda": 0.0, "seq_kd": True}),
):
    [(loss, mean, divided, tokens)] = steps(length, 1, **settings)
    print(f"{label + ',':8} answers of {length:2} tokens       {loss:8.3f} {mean:7.3f} {divided:11} {tokens:7}")
    assert tokens == BATCH * GENERATED and divided == BATCH * length
    assert abs(loss / mean - GENERATED / length) < 1e-3 * GENERATED / length
seen = steps(2, 6)
assert {tokens for _, _, _, tokens in seen} == {BATCH * 2, BATCH * GENERATED}, seen
for step, (loss, mean, divided, tokens) in enumerate(seen, 1):
    label = "generated" if tokens == BATCH * GENERATED else "dataset"
    print(f"lmbda=0.5, 2 tokens, step {step}: {label:9} {loss:7.3f} {mean:7.3f} {divided:11} {tokens:7}")
    assert divided == BATCH * 2
    assert abs(loss / mean - tokens / divided) < 1e-3 * tokens / divided
PY
