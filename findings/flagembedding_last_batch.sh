#!/usr/bin/env bash
# FlagEmbedding 1.4.2, Python 3.11: in a last batch that is not full, the reranker trains negatives as the right answer
#
# Valid input: fine-tuning of a reranker with the default sizes, that is groups of 8 passages, the relevant one first,
# and batches of 8 questions. The number of questions is no multiple of 8. Here a small BERT is to learn which passage
# of a group is relevant, and one word in it tells.
#
# Expected: each question of a batch is one row of 8 scores, and the first of them is to be the highest.
#
# Seen: the scores are always put into as many rows as a full batch has questions. With 7 questions left they are 8
# rows of 7 instead of 7 rows of 8. So passages of two questions share a row, all rows but the first begin with a
# negative, which is trained as the right answer, and in most of them a relevant passage is trained as a wrong one.
# Nothing is raised, as the scores of groups of 8 can always be cut this way. There is one such batch per epoch.
# dataloader_drop_last=True, which is not the default, avoids it.
#
# Why it matters: the loss looks normal, but the batch undoes what the full ones teach, the more, the fewer they are. A
# reranker that is adapted to a small set learns little, and with 7 questions in all nothing useful. Teacher scores
# are cut the same way.
#
# Output, after 200 steps, of the questions trained with (part whose relevant passage has the highest score, and the
# mean probability of the relevant passage among the 8; then the same with rows cut by the size of the groups):
#                   as released        by groups
#   questions    first  chance    first  chance
#           7     0.00    0.13     1.00    0.98
#           8     1.00    0.98     1.00    0.98
#          15     1.00    0.38     1.00    0.98
#          23     1.00    0.81     1.00    0.98
#          47     1.00    0.96     1.00    0.98
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
# FlagEmbedding asks for transformers below 6, but cannot be imported with 5.24.
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.3.0 \
    FlagEmbedding==1.4.2 datasets==5.2.0 accelerate==1.15.0 peft==0.21.2 sentence-transformers==6.2.0 \
    huggingface-hub==1.33.0 || exit 2
cd "$work"
OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HF_HOME="$work" "$work/venv/bin/python" -W ignore - 2>log.txt <<'PY' || \
    { tail -5 log.txt >&2; exit 1; }
import json
import random

import torch
from FlagEmbedding.abc.finetune.reranker import AbsRerankerModel
from FlagEmbedding.abc.finetune.reranker import AbsRerankerDataArguments as DataArguments
from FlagEmbedding.abc.finetune.reranker import AbsRerankerModelArguments as ModelArguments
from FlagEmbedding.abc.finetune.reranker import AbsRerankerTrainingArguments as TrainingArguments
from FlagEmbedding.finetune.reranker.encoder_only.base import EncoderOnlyRerankerRunner
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PrinterCallback
from transformers import PreTrainedTokenizerFast, set_seed

GROUP = 8
STEPS = 200
WORDS = [f"w{number}" for number in range(40)]
torch.set_num_threads(1)
vocabulary = {word: place for place, word in enumerate(["[PAD]", "[CLS]", "[SEP]", "[UNK]", "good", "bad", *WORDS])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer.post_processor = processors.TemplateProcessing(
    single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
)
special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained("start")
set_seed(0)
sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, num_labels=1)
BertForSequenceClassification(BertConfig(vocab_size=len(vocabulary), **sizes)).save_pretrained("start")
released = AbsRerankerModel.forward


def by_groups(self, pair=None, teacher_scores=None):
    self.train_batch_size = len(pair["input_ids"]) // GROUP
    return released(self, pair, teacher_scores)


def text(first):
    return " ".join([first, *random.sample(WORDS, 4)])


def trained(questions, forward):
    """The scores of all groups after training, the relevant passage first."""
    AbsRerankerModel.forward = forward
    random.seed(0)
    rows = []
    for _ in range(questions):
        negatives = [text("bad") for _ in range(GROUP - 1)]
        rows.append({"query": text("w0"), "pos": [text("good")], "neg": negatives})
    name = f"{questions}-{forward.__name__}"
    with open(f"{name}.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    training = TrainingArguments(
        output_dir=name, max_steps=STEPS, learning_rate=1e-3, use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True,
    )
    runner = EncoderOnlyRerankerRunner(ModelArguments("start"), DataArguments([f"{name}.jsonl"]), training)
    assert training.per_device_train_batch_size == 8 and runner.data_args.train_group_size == GROUP
    runner.trainer.remove_callback(PrinterCallback)
    runner.run()
    runner.model.eval()
    scores = []
    for place in range(questions):
        pairs, _ = runner.train_dataset[place]
        batch = runner.data_collator([(pairs, None)])["pair"]
        with torch.no_grad():
            scores.append(runner.model.encode(batch).flatten())
    return torch.stack(scores)


print(f"{'':10}{'as released':>17}{'by groups':>17}")
print("questions    first  chance    first  chance")
chances = {}
for questions in (7, 8, 15, 23, 47):
    parts = []
    for forward in (released, by_groups):
        scores = trained(questions, forward)
        parts.append((scores[:, :1] > scores[:, 1:]).all(1).float().mean().item())
        parts.append(scores.softmax(1)[:, 0].mean().item())
    assert parts[2] == 1 and parts[3] > 0.95, parts
    chances[questions] = parts[1]
    print(f"{questions:9}" + "".join(f"{part:{width}.2f}" for part, width in zip(parts, (9, 8, 9, 8))))
assert chances[7] < 0.2 and chances[15] < 0.6 and chances[23] < 0.9 and chances[8] > 0.95, chances
PY
