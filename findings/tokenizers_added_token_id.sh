#!/usr/bin/env bash
# tokenizers 0.23.3, Python 3.11: add_tokens gives a new token the id of another token
#
# Valid input: a vocabulary whose ids have a hole, as after unused tokens were pruned (the ids of the others stay, since
# the rows of the embedding do). It loads, encodes and decodes without a warning.
#
# Expected: a new token gets a free id: the hole or the highest id plus one.
#
# Seen: it gets the number of tokens in the vocabulary, also where that id is taken. Two tokens then share an id (and
# an embedding row), both decode to the new one, and nothing is reported.
#
# Why it matters: whoever prunes the vocabulary of a small model and adds tags such as <search> trains the row of a
# word as the tag, and every such word in an answer is decoded as the tag.
#
# Output:
#   vocabulary: {'paris': 0, 'is': 1, 'big': 3}
#   add_tokens(['<search>']) returns 1
#   <search> has id 3, big has id 3
#   ids of 'paris is big <search>': [0, 1, 3, 3]
#   decoded: paris is <search> <search>
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet tokenizers==0.23.3 || exit 2
"$work/venv/bin/python" - <<'PY'
from tokenizers import Tokenizer, models, pre_tokenizers

vocabulary = {"paris": 0, "is": 1, "big": 3}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="is"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
print("vocabulary:", vocabulary)
print("add_tokens(['<search>']) returns", tokenizer.add_tokens(["<search>"]))
search = tokenizer.token_to_id("<search>")
big = tokenizer.token_to_id("big")
print(f"<search> has id {search}, big has id {big}")
ids = tokenizer.encode("paris is big <search>").ids
text = tokenizer.decode(ids, skip_special_tokens=False)
print("ids of 'paris is big <search>':", ids)
print("decoded:", text)

assert search == big == 3
assert ids == [0, 1, 3, 3]
assert text == "paris is <search> <search>"
PY
