#!/usr/bin/env bash
# tokenizers 0.23.3, Python 3.11: one stray byte after a good character stops a stream and erases the character
#
# Valid input: a BPE with byte fallback (the kind of Llama and Gemma) and ids of its own vocabulary. A model samples
# byte tokens one at a time, so "日本" can be followed by the first byte of a third character and then by a letter.
#
# Expected: "日本\ufffdb" from decode (as bytes.decode(errors="replace") gives), and the same text in pieces from
# DecodeStream, which exists to give pieces while a model writes.
#
# Seen: decode replaces every byte of the run, also those of 日本, by U+FFFD. DecodeStream has given 日 and 本
# by then, finds that they are no longer there, and raises; every later step raises too.
#
# Why it matters: nothing keeps a sampling model from such bytes. A server that streams with DecodeStream breaks off
# the reply, and one that decodes at the end loses characters that were right.
#
# Output:
#   decode of the good characters: '日本'
#   decode with one stray byte:    '\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffdb'
#   errors="replace" gives:        '日本\ufffdb'
#   stream: ['日', '本']
#   then: Invalid prefix encountered while decoding stream. Token ID: 259, Expected prefix: '本', Actual string: ...
#   the next token: raises too
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet tokenizers==0.23.3 || exit 2
"$work/venv/bin/python" - <<'PY'
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
vocabulary["<unk>"] = 256
vocabulary["a"] = 258
vocabulary["b"] = 259
tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])

good = tokenizer.encode("日本").ids
stray = 0xE3
letter = tokenizer.token_to_id("b")
whole = tokenizer.decode(good + [stray, letter])
replaced = bytes(good + [stray]).decode(errors="replace") + "b"
print("decode of the good characters:", ascii(tokenizer.decode(good)).replace(r"\u65e5\u672c", "日本"))
print("decode with one stray byte:   ", ascii(whole))
print('errors="replace" gives:       ', ascii(replaced).replace(r"\u65e5\u672c", "日本"))

stream = DecodeStream()
pieces = [stream.step(tokenizer, token) for token in good + [stray]]
pieces = [piece for piece in pieces if piece]
print("stream:", pieces)
errors = []
for token in (letter, letter):
    try:
        stream.step(tokenizer, token)
    except Exception as error:
        errors.append(str(error))
print("then:", errors[0].partition("Actual string")[0] + "Actual string: ..." if errors else "no error")
print("the next token:", "raises too" if len(errors) == 2 else "is decoded")

assert tokenizer.decode(good) == "日本"
assert replaced == "日本\ufffdb"
assert whole == "\ufffd" * 7 + "b"
assert pieces == ["日", "本"]
assert len(errors) == 2
assert "Invalid prefix" in errors[0]
PY
