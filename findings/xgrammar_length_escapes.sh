#!/usr/bin/env bash
# xgrammar 0.2.9, Python 3.11: a string with minLength or maxLength in its schema can have no quotation mark
#
# Valid input: compile_json_schema of {"type": "string", "minLength": 1}, the usual way to ask for an answer that is not
# empty, and JSON strings whose text has a quotation mark, a line break or a backslash. JSON writes these as escapes, and
# by JSON Schema an escape is one character, so all of them are valid.
#
# Expected: what is accepted without a length is accepted with one, if it is long enough. llguidance does so.
#
# Seen: with minLength or maxLength no escape is accepted at all. So no model can write the 3" disc, a title in quotation
# marks, or an analysis of two lines, whatever its probability: it has to write another answer. No warning is given.
#
# Why it matters: judges and teachers answer in JSON, and an upper length is what keeps a small model from running on.
# The lengths of the schema and the limit of tokens look like the same guard, but only the second leaves the text alone.
# Leave minLength and maxLength out and check the length of what comes back, or use llguidance.
#
# Output:
#   schema                                 JSON string        xgrammar  llguidance
#   {"type": "string"}                     "plain"            True      True
#   {"type": "string"}                     "the 3\" disc"     True      True
#   {"type": "string"}                     "two\nlines"       True      True
#   {"type": "string"}                     "a\\b"             True      True
#   {"type": "string", "minLength": 1}     "plain"            True      True
#   {"type": "string", "minLength": 1}     "the 3\" disc"     False     True
#   {"type": "string", "minLength": 1}     "two\nlines"       False     True
#   {"type": "string", "minLength": 1}     "a\\b"             False     True
#   {"type": "string", "maxLength": 40}    "plain"            True      True
#   {"type": "string", "maxLength": 40}    "the 3\" disc"     False     True
#   {"type": "string", "maxLength": 40}    "two\nlines"       False     True
#   {"type": "string", "maxLength": 40}    "a\\b"             False     True
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet xgrammar==0.2.9 llguidance==1.9.1 torch==2.13.0 numpy==2.4.6 || exit 2
"$work/venv/bin/python" - <<'PY'
import json

import xgrammar
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

END = 256  # the token after the 256 bytes


class Bytes:
    """A tokenizer whose tokens are single bytes, as llguidance wants one."""

    eos_token_id = END
    bos_token_id = None
    special_token_ids = [END]
    tokens = [*(bytes([byte]) for byte in range(256)), b"</s>"]

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())


vocabulary = [*(chr(byte) if byte < 128 else f"<0x{byte:02X}>" for byte in range(256)), "</s>"]
info = xgrammar.TokenizerInfo(vocabulary, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[END])
compiler = xgrammar.GrammarCompiler(info)
tokenizer = LLTokenizer(TokenizerWrapper(Bytes()))


def by_xgrammar(schema, text):
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(schema))
    return bool(matcher.accept_string(text) and matcher.accept_token(END))


def by_llguidance(schema, text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema))
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


print(f"{'schema':<38} {'JSON string':<18} xgrammar  llguidance")
seen = {}
for limits in ({}, {"minLength": 1}, {"maxLength": 40}):
    for value in ("plain", 'the 3" disc', "two\nlines", "a\\b"):
        schema = json.dumps({"type": "string"} | limits)
        text = json.dumps(value)
        seen[bool(limits), value] = by_xgrammar(schema, text), by_llguidance(schema, text)
        print(f"{schema:<38} {text:<18} {seen[bool(limits), value][0]!s:<9} {seen[bool(limits), value][1]}")
for (is_limited, value), (xgrammar_accepts, llguidance_accepts) in seen.items():
    assert llguidance_accepts
    assert xgrammar_accepts == (not is_limited or value == "plain"), (is_limited, value)
PY
