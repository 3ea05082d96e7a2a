#!/usr/bin/env bash
# transformers 5.24.0, tokenizers 0.23.3, Python 3.11: save_pretrained saves the truncation of the last call
#
# Valid input: a tokenizer is called once with truncation=True, max_length=3, as in an evaluation, then saved.
#
# Expected: truncation and padding are arguments of one call. The saved tokenizer is the one that was loaded.
#
# Seen: tokenizer.json has max_length 3 in it (and a fixed padding, where the call had one). transformers itself does
# not show it, since it sets both again at each call. A program that loads tokenizer.json with the tokenizers library
# and does not set them cuts every text to 3 tokens, without a warning. A call without truncation before saving
# removes it again, so the file depends on which call came last.
#
# Why it matters: a model that is fine-tuned and evaluated with transformers and served elsewhere sees the beginning
# of each prompt or passage only; answers and embeddings get worse and nothing says why.
#
# Output:
#   before the call: truncation None, padding None
#   after it:        truncation max_length 3, padding None
#   tokenizers reads 'w0 w1 w2 w3 w4 w5' as ['w0', 'w1', 'w2']
#   transformers reads it as 6 tokens
#   after a call with padding="max_length", max_length=8: padding {'Fixed': 8}
#   after a call without arguments: truncation None, padding None
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet transformers==5.24.0 tokenizers==0.23.3 || exit 2
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$work/venv/bin/python" - "$work/model" <<'PY'
import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

folder = Path(sys.argv[1])
words = ["[UNK]", "[PAD]", "w0", "w1", "w2", "w3", "w4", "w5"]
backend = Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token="[UNK]"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]")
text = "w0 w1 w2 w3 w4 w5"


def saved() -> tuple[dict | None, dict | None]:
    """What the saved tokenizer.json says about truncation and padding."""
    tokenizer.save_pretrained(folder)
    definition = json.loads((folder / "tokenizer.json").read_text())
    return definition["truncation"], definition["padding"]


before = saved()
print(f"before the call: truncation {before[0]}, padding {before[1]}")
tokenizer(text, truncation=True, max_length=3)
truncation, padding = saved()
print(f"after it:        truncation max_length {truncation and truncation['max_length']}, padding {padding}")
elsewhere = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).tokens
print(f"tokenizers reads {text!r} as {elsewhere}")
here = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
print(f"transformers reads it as {len(here)} tokens")
tokenizer(text, padding="max_length", max_length=8)
_, fixed = saved()
print(f'after a call with padding="max_length", max_length=8: padding {fixed and fixed["strategy"]}')
tokenizer(text)
after = saved()
print(f"after a call without arguments: truncation {after[0]}, padding {after[1]}")

assert before == (None, None)
assert truncation["max_length"] == 3
assert elsewhere == ["w0", "w1", "w2"]
assert len(here) == 6
assert fixed["strategy"] == {"Fixed": 8}
assert after == (None, None)
PY
