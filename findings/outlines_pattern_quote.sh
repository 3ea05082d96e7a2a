#!/usr/bin/env bash
# outlines_core 0.2.14, Python 3.11: constrained decoding with a string pattern allows text that is no JSON
#
# Valid input: a JSON schema with a string property and a usual `pattern`: no comma, at least one character.
#
# Expected: the pattern constrains the value of the string. The text that the guide lets a model write is JSON in any
# case: a quote or a backslash within the value is written \" or \\.
#
# Seen: the pattern is pasted between two quotes as it is. [^,] and . match a bare quote and a backslash, so the guide
# offers them and accepts texts that no JSON parser reads. The string type without a pattern refuses them.
#
# Why it matters: the reason to constrain a small model is that its output always parses. Patterns with a negated class
# or a dot are what one writes for queries, titles and names, where texts have quotes.
#
# Output:
#   {"query":"who wrote "it""}   pattern ^[^,]+$   allowed and complete; json: Expecting ',' delimiter
#   {"query":"a\"}               pattern ^.+$      allowed and complete; json: Unterminated string starting at
#   {"query":"who wrote "it""}   no pattern        refused
#   {"query":"a\"}               no pattern        refused
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet outlines_core==0.2.14 || exit 2
"$work/venv/bin/python" - <<'PY'
import json

from outlines_core import Guide, Index, Vocabulary
from outlines_core.json_schema import build_regex_from_schema


def allowed(text: str, pattern: str | None) -> bool:
    """Whether a model with one token for each character may write the text and then stop."""
    string = {"type": "string"}
    if pattern:
        string["pattern"] = pattern
    schema = {"type": "object", "properties": {"query": string}, "required": ["query"]}
    tokens = {}
    for number, character in enumerate(sorted(set(text)), start=1):
        tokens[character] = number
    vocabulary = Vocabulary(0, {character: [number] for character, number in tokens.items()})
    guide = Guide(Index(build_regex_from_schema(json.dumps(schema)), vocabulary))
    for character in text:
        if tokens[character] not in guide.get_tokens():
            return False
        guide.advance(tokens[character])
    return guide.is_finished()


def error(text: str) -> str:
    try:
        json.loads(text)
    except json.JSONDecodeError as problem:
        return problem.msg
    return ""


quoted = '{"query":"who wrote "it""}'
escaped = '{"query":"a\\"}'
results = []
for text, pattern in ((quoted, "^[^,]+$"), (escaped, "^.+$"), (quoted, None), (escaped, None)):
    accepted = allowed(text, pattern)
    results.append(accepted)
    label = f"pattern {pattern}" if pattern else "no pattern"
    verdict = f"allowed and complete; json: {error(text)}" if accepted else "refused"
    print(f"{text:28} {label:17} {verdict}")

assert allowed('{"query":"who wrote it"}', "^[^,]+$")
assert error(quoted)
assert error(escaped)
assert results == [True, True, False, False]
PY
