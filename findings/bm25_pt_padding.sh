#!/usr/bin/env bash
# bm25_pt 0.0.7, Python 3.11: unless the id of the padding is 0, padding counts as words of the passages
#
# Valid input: BM25(tokenizer) with tokenizers of transformers that split the same texts into the same words. In one the
# padding token has the id 0, as in BERT, in the other the id 1, as in RoBERTa. Six passages and a question.
#
# Expected: the scores of BM25 with the settings k1 and b, the same for both tokenizers, since an id is only a name.
#
# Seen: what is not 0 counts as a word. With the other tokenizer each passage is as long as the longest one among those
# that are indexed together, so the length plays no part: any `b` gives the scores of b=0. The word with the id 0 is
# lost: no passage has it. In a batch of questions the short ones are padded, and passages match them by their padding.
# In so small a collection, one without any word of the question gets a greater score than one with both.
#
# Why it matters: GPT-2, Llama, Qwen and RoBERTa have another padding, and it is natural to give the tokenizer of one's
# own model. Nothing is raised, and the scores of one question alone are plausible. But tuning b shows that it has no
# effect, long passages are preferred, and the scores of a question depend on the other questions of its batch.
#
# Output:
#                                               long   short    half    none
#   b= 0.0  by hand                             1.72    1.72    0.69    0.00
#           padding 0                           1.72    1.72    0.69    0.00
#           padding 1                           1.72    1.72    0.69    0.00
#   b=0.75  by hand                             0.72    2.52    0.95    0.00
#           padding 0                           0.72    2.52    0.95    0.00
#           padding 1                           1.72    1.72    0.69    0.00
#   b= 1.0  by hand                             0.60    2.99    1.09    0.00
#           padding 0                           0.60    2.99    1.09    0.00
#           padding 1                           1.72    1.72    0.69    0.00
#   b=0.75  padding 1, 'solar' is 0             0.70    0.70    0.69    0.00
#   b=0.75  padding 0, beside a longer one      0.72    2.52    0.95    0.00
#   b=0.75  padding 1, beside a longer one      1.72    5.21    4.17    3.48
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet bm25_pt==0.0.7 torch==2.13.0 transformers==5.24.0 scipy==1.17.1 numpy==2.4.6 ||
  exit 2
TQDM_DISABLE=1 "$work/venv/bin/python" -W ignore - <<'PY'
from math import isclose, log

from bm25_pt import BM25
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PASSAGES = [
    "solar panel " + "roof house street garden " * 10,
    "solar panel price",
    "the panel of judges",
    "rain in the garden",
    "the price of rain",
    "a street of houses",
]
QUESTION = "solar panel"
LONGER = "solar panel price in the street of rain"
WORDS = sorted({word for passage in PASSAGES for word in passage.split()})
K1 = 1.5


def tokenizer(first: list[str]) -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(first + WORDS))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")


def by_hand(question: str, b: float) -> list[float]:
    texts = [passage.split() for passage in PASSAGES]
    mean = sum(map(len, texts)) / len(texts)
    scores = [0.0] * len(texts)
    for word in question.split():
        having = sum(word in text for text in texts)
        idf = log(1 + (len(texts) - having + 0.5) / (having + 0.5))
        for place, text in enumerate(texts):
            count = text.count(word)
            scores[place] += idf * count * (K1 + 1) / (count + K1 * (1 - b + b * len(text) / mean))
    return scores


def close(some: list[float], others: list[float]) -> bool:
    return all(isclose(one, other, abs_tol=1e-5) for one, other in zip(some, others, strict=True))


def row(label: str, scores: list[float]) -> None:
    print(f"{label:40}" + "".join(f"{score:8.2f}" for score in scores[:4]))


def seen(first: list[str], b: float) -> BM25:
    index = BM25(tokenizer=tokenizer(first), k1=K1, b=b)
    index.index(PASSAGES)
    return index


print(" " * 40 + "".join(f"{name:>8}" for name in ("long", "short", "half", "none")))
for b in (0.0, 0.75, 1.0):
    right = by_hand(QUESTION, b)
    zero, one = (seen(first, b).score(QUESTION).tolist() for first in (["[PAD]", "[UNK]"], ["[UNK]", "[PAD]"]))
    row(f"b={b:4}  by hand", right)
    row("        padding 0", zero)
    row("        padding 1", one)
    assert close(zero, right)
    assert close(one, by_hand(QUESTION, 0))
lost = seen(["solar", "[PAD]", "[UNK]"], 0.75).score(QUESTION).tolist()
row("b=0.75  padding 1, 'solar' is 0", lost)
assert lost[0] < 1 and lost[1] < 1
zero, one = (
    seen(first, 0.75).score_batch([QUESTION, LONGER])[0].tolist() for first in (["[PAD]", "[UNK]"], ["[UNK]", "[PAD]"])
)
row("b=0.75  padding 0, beside a longer one", zero)
row("b=0.75  padding 1, beside a longer one", one)
assert close(zero, by_hand(QUESTION, 0.75))
assert one[3] > 3
PY
