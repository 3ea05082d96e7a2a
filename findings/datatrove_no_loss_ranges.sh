#!/usr/bin/env bash
# datatrove 0.10.1, Python 3.11: a range without loss that ends at a space takes the answer out of the training data
#
# Valid input: 100 questions with answers, "Question: 3 + 4 Answer: 7 .", written by `DocumentTokenizer` with
# save_loss_metadata=True; `no_loss_ranges` in the metadata has the characters of the prompt. Also a text without ranges.
# A tokenizer has whole offsets, or leaves the space before a word out of them: the default of ByteLevel in `tokenizers`,
# and all that split at spaces.
#
# Expected: all tokens are written, those of the prompt with 0 for the loss and the others with 1. By the documentation
# the ranges are start and end positions of characters, and a mask makes that "we ignore the loss for the prompt".
#
# Seen: the first token without the mask is looked up as that of the character at `end`. If it is a space that belongs to
# no token, there is none. That is read as "up to the end of the document", and prompt and answer are both left out: the
# document is empty. A range in the middle cuts off all that follows it. With `start` at such a space, the mask begins at
# the first token of the document. With an end at the first letter of the answer all is right. There is no warning.
#
# Why it matters: a prompt ends with "Answer:", and " 7" follows. The examples are gone, not masked, and a model is
# trained on what is left, without one answer.
#
# Output (tokens written, and those with loss, of both what is expected; 5 are of the text without ranges. Ranges: the
# prompt; the prompt and the space; "3 + 4"; and " Answer: " with its spaces):
#                                  written  loss  expected
#   bytes, whole    [0, 23]            905   205   905   205
#   bytes, whole    [0, 24]            905   205   905   205
#   bytes, whole    [10, 15]           905   605   905   605
#   bytes, whole    [15, 24]           905   705   905   705
#   bytes, trimmed  [0, 23]              5     5   905   205
#   bytes, trimmed  [0, 24]            905   205   905   205
#   bytes, trimmed  [10, 15]           205   205   905   605
#   bytes, trimmed  [15, 24]           905   205   905   705
#   words           [0, 23]              5     5   905   205
#   words           [0, 24]            905   205   905   205
#   words           [10, 15]           205   205   905   605
#   words           [15, 24]           905   205   905   705
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet datatrove==0.10.1 numpy==2.4.6 tokenizers==0.23.3 regex==2026.11.19 || exit 2
OMP_NUM_THREADS=1 "$work/venv/bin/python" - "$work" <<'PY'
import os
import sys

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.tokens import DocumentTokenizer
from loguru import logger
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

warnings = []
logger.remove()
logger.add(lambda message: warnings.append(str(message)), level="WARNING")
PROMPT = "Question: {} + {} Answer:"
texts = [(PROMPT + " {} .").format(a, b, a + b) for a in range(10) for b in range(10)]
plain = "A text without ranges ."
length = len(PROMPT.format(0, 0))  # The same for all.


def byte_level(trimmed):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trimmed)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts + [plain], trainer)
    return tokenizer


def words():
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(texts + [plain], trainer)
    return tokenizer


def write(name, tokenizer, ranges):
    folder = os.path.join(sys.argv[1], name)
    tokenizer.save(f"{folder}.json")
    step = DocumentTokenizer(folder, f"{folder}.json", save_loss_metadata=True, shuffle_documents=False)
    documents = [Document(text=text, id=text, metadata={"no_loss_ranges": ranges}) for text in texts]
    step.run(documents + [Document(text=plain, id=plain)])
    tokens = np.fromfile(f"{folder}/00000_unshuffled.ds", dtype=np.uint16)
    loss = np.fromfile(f"{folder}/00000_unshuffled.ds.loss", dtype=np.uint8)
    assert len(tokens) == len(loss)
    return len(tokens), int(loss.sum())


def by_hand(tokenizer, ranges):
    """A token is in a range if its last character is."""
    ends = [end for text in texts for _, end in tokenizer.encode(text).offsets]
    masked = sum(any(first < end <= last for first, last in ranges) for end in ends)
    total = len(ends) + len(tokenizer.encode(plain).ids)
    return total, total - masked


print(f"{'':31}written  loss  expected")
for label, tokenizer, right in (
    ("bytes, whole", byte_level(False), (True, True, True, True)),
    ("bytes, trimmed", byte_level(True), (False, True, False, False)),
    ("words", words(), (False, True, False, False)),
):
    for ranges, good in zip(([0, length], [0, length + 1], [10, 15], [15, length + 1]), right):
        seen, expected = write(f"{label} {ranges}", tokenizer, [ranges]), by_hand(tokenizer, [ranges])
        print(f"{label:16}{str(ranges):10}{seen[0]:12}{seen[1]:6}{expected[0]:6}{expected[1]:6}")
        assert (seen == expected) == good, (label, ranges)
        assert good or seen[1] < expected[1]
assert not warnings, warnings
PY
