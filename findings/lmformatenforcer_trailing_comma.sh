#!/usr/bin/env bash
# lm-format-enforcer 0.11.3, Python 3.11: constrained decoding allows a comma after the last property, which is no JSON
#
# Valid input: the schema of an object with a required `query` and an optional `reason`; and of a dictionary of numbers.
#
# Expected: "guarantees that the output will match the format" (its README). After a comma comes a key.
#
# Seen: after the comma, the parser is in the state that follows the opening brace, where a key or the closing brace may
# come. So {"query": "a",} is allowed and complete. It happens wherever a property can still come: an optional one
# is missing, or the object is a dictionary, also within arrays. Arrays themselves and objects whose properties are all
# there refuse it.
#
# Why it matters: the reason to constrain a small model is that its output always parses. Small models write trailing
# commas, as Python, JavaScript and JSON5 have them, and a call of a tool with an optional argument is a usual schema.
#
# Output:
#   {"query": "a",}                  optional property missing   allowed and complete; json: no
#   [{"query": "a",}]                the same within an array    allowed and complete; json: no
#   {"Paris": 1,}                    dictionary                  allowed and complete; json: no
#   {"query": "a", "reason": "b",}   all properties there        refused; json: no
#   [1,]                             array                       refused; json: no
#   {"query": "a"}                   optional property missing   allowed and complete; json: yes
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet lm-format-enforcer==0.11.3 interegular==0.3.3 pydantic==2.14.4 || exit 2
"$work/venv/bin/python" - <<'PY'
import json

from lmformatenforcer import JsonSchemaParser

text = {"type": "string"}
search = {"type": "object", "properties": {"query": text, "reason": text}, "required": ["query"]}
searches = {"type": "array", "items": search}
counts = {"type": "object", "additionalProperties": {"type": "integer"}}
numbers = {"type": "array", "items": {"type": "integer"}}


def allowed(output: str, schema: dict) -> bool:
    """Whether a model may write the text, one character at a time, and then stop."""
    parser = JsonSchemaParser(schema)
    for character in output:
        if character not in parser.get_allowed_characters():
            return False
        parser = parser.add_character(character)
    return parser.can_end()


def parses(output: str) -> bool:
    try:
        json.loads(output)
    except json.JSONDecodeError:
        return False
    return True


cases = [
    ('{"query": "a",}', search, "optional property missing"),
    ('[{"query": "a",}]', searches, "the same within an array"),
    ('{"Paris": 1,}', counts, "dictionary"),
    ('{"query": "a", "reason": "b",}', search, "all properties there"),
    ("[1,]", numbers, "array"),
    ('{"query": "a"}', search, "optional property missing"),
]
results = []
for output, schema, label in cases:
    result = (allowed(output, schema), parses(output))
    results.append(result)
    verdict = "allowed and complete" if result[0] else "refused"
    valid = "yes" if result[1] else "no"
    print(f"{output:32} {label:27} {verdict}; json: {valid}")

refused = (False, False)
assert results == [(True, False), (True, False), (True, False), refused, refused, (True, True)]
PY
