#!/usr/bin/env bash
# tantivy 0.27.0, Python 3.11: a query with AND NOT finds nothing, where the same with a minus finds the right passages
#
# Valid input: four passages, and queries for Index.parse_query with its operators AND, OR, NOT, + and -.
#
# Expected: "capital AND NOT paris" finds what "capital -paris" finds, the passages with the one word and without the
# other. A query that cannot be answered is refused, as "NOT paris" alone is: "Only excluding terms given".
#
# Seen: behind AND or OR, the negated word becomes a query of its own that only excludes, and such a query matches no
# passage. So AND with it matches nothing, and OR with it adds nothing. There is no error, and the lenient parser
# reports none either. "capital NOT paris", without AND, and "+capital AND -paris" are right.
#
# Why it matters: a AND NOT b is the form that the other engines document, and that a model writes when it may use
# operators. The empty result reads as "not in the corpus". Where it stands in brackets behind OR, results are there
# and some are lost.
#
# Output (passages found, by parse_query and by parse_query_lenient):
#   capital -paris                    [1]     right
#   capital NOT paris                 [1]     right
#   capital AND NOT paris             []      expected [1]
#   +capital AND -paris               [1]     right
#   (capital OR city) AND NOT paris   []      expected [1, 3]
#   rome OR (capital AND NOT paris)   [3]     expected [1, 3]
#   rome OR (capital -paris)          [1, 3]  right
#   rome OR NOT paris                 [3]     expected [1, 3]
#   NOT paris                         refused: Invalid query: Only excluding terms given
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet tantivy==0.27.0 || exit 2
"$work/venv/bin/python" - <<'PY'
import tantivy

PASSAGES = ["Paris is the capital of France", "London is the capital of England", "Paris in Texas", "The city of Rome"]
EXPECTED = {
    "capital -paris": [1],
    "capital NOT paris": [1],
    "capital AND NOT paris": [1],
    "+capital AND -paris": [1],
    "(capital OR city) AND NOT paris": [1, 3],
    "rome OR (capital AND NOT paris)": [1, 3],
    "rome OR (capital -paris)": [1, 3],
    "rome OR NOT paris": [1, 3],
}

schema = tantivy.SchemaBuilder()
schema.add_integer_field("number", stored=True)
schema.add_text_field("text")
index = tantivy.Index(schema.build())
writer = index.writer(num_threads=1)
for number, text in enumerate(PASSAGES):
    writer.add_document(tantivy.Document(number=number, text=text))
writer.commit()
index.reload()
searcher = index.searcher()


def found(query: tantivy.Query) -> list[int]:
    hits = searcher.search(query, limit=10).hits
    return sorted(searcher.doc(address)["number"][0] for _, address in hits)


results = {}
for text, right in EXPECTED.items():
    results[text] = found(index.parse_query(text, ["text"]))
    query, errors = index.parse_query_lenient(text, ["text"])
    assert not errors
    assert found(query) == results[text]
    verdict = "right" if results[text] == right else f"expected {right}"
    print(f"{text:33} {results[text]!s:7} {verdict}")
try:
    index.parse_query("NOT paris", ["text"])
    refused = False
except ValueError as error:
    refused = True
    print(f"{'NOT paris':33} refused: {error}")

assert refused
for text in ("capital -paris", "capital NOT paris", "+capital AND -paris", "rome OR (capital -paris)"):
    assert results[text] == EXPECTED[text]
for text in ("capital AND NOT paris", "(capital OR city) AND NOT paris"):
    assert results[text] == []
for text in ("rome OR (capital AND NOT paris)", "rome OR NOT paris"):
    assert results[text] == [3]
PY
