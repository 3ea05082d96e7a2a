#!/usr/bin/env bash
# model2vec 0.10.0, Python 3.11: text is cut before max_length tokens, by its characters
#
# Valid input: a text of 500 words that are 500 tokens, and the default max_length of 512, which the documentation
# of the class and of encode counts in tokens: "Any tokens beyond this length will be truncated".
#
# Expected: all 500 words count in the embedding. It equals the one with max_length=None.
#
# Seen: before the tokenizer runs, the text is cut to 512 times the median length of the vocabulary's entries, in
# characters. Of 400 long words and 100 short ones the last are lost: the embedding has no share of them. Counted in
# tokens, the text was cut at about a quarter of max_length.
#
# Why it matters: static embeddings serve as retrievers on small machines. Passages of long words (legal, medical,
# German, chemical) lose their ends without a warning, and the limit in tokens looks as if it had room.
#
# Output:
#   tokens: 500 of at most 512
#   median length of an entry: 5
#   shares of 'internationalization' and 'cat' by default:      1.0 0.0
#   shares of 'internationalization' and 'cat' without a limit: 0.8 0.2
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet model2vec==0.10.0 tokenizers==0.23.3 numpy==2.4.6 || exit 2
HF_HUB_OFFLINE=1 "$work/venv/bin/python" - <<'PY'
import numpy as np
from model2vec import StaticModel
from tokenizers import Tokenizer, models, pre_tokenizers

words = ["[UNK]", "[PAD]", "cat", "house", "internationalization", "water"]
tokenizer = Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
model = StaticModel(np.eye(len(words), dtype=np.float32), tokenizer)
text = " ".join(["internationalization"] * 400 + ["cat"] * 100)
cut = model.encode(text)
whole = model.encode(text, max_length=None)
print("tokens:", len(tokenizer.encode(text).ids), "of at most", model.max_length)
print("median length of an entry:", model.median_token_length)
print("shares of 'internationalization' and 'cat' by default:     ", cut[4].round(2), cut[2].round(2))
print("shares of 'internationalization' and 'cat' without a limit:", whole[4].round(2), whole[2].round(2))

assert model.max_length == 512
assert cut[2] == 0
assert abs(whole[2] - 0.2) < 1e-6
PY
