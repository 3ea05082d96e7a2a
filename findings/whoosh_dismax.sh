#!/usr/bin/env bash
# Whoosh-Reloaded 2.7.5, Python 3.11: DisMaxParser gives a passage the score of another passage
#
# Valid input: five passages with a title and a text, and the question "tea" for DisMaxParser, which is for plain
# questions over several fields; the title counts twice. Then the same as a DisjunctionMax with a tiebreak of 0.5.
#
# Expected: the documentation says that a passage is scored by its best field. "tea" is in one title; this passage is
# the first, and the others have the score of their text. With a tiebreak a part of the other fields is added.
#
# Seen: of the two fields the greater of their current scores is taken, without a look at where each of them stands. A
# passage that has the word in its text alone gets the score of the next passage that has it in the title. Here a
# breakfast comes first, with the score of "how to brew tea". Behind the last such title the scores are right. The
# tiebreak changes nothing. The sum of the fields, by MultifieldParser, is right.
#
# Why it matters: nothing is raised, and with a weight of the title the passages that only mention a word share the
# first places with those about it. limit=None and optimize=False, as here, do not help.
#
# Output:
#   title alone           how to brew tea 2.61
#   text alone            garden 1.30   breakfast 1.21   how to brew tea 1.13
#   tiebreak 0.0
#     by hand             how to brew tea 2.61   garden 1.30   breakfast 1.21
#     DisMaxParser        breakfast 2.61   how to brew tea 2.61   garden 1.30
#   tiebreak 0.5
#     by hand             how to brew tea 3.18   garden 1.30   breakfast 1.21
#     DisjunctionMax      breakfast 2.61   how to brew tea 2.61   garden 1.30
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet Whoosh-Reloaded==2.7.5 || exit 2
"$work/venv/bin/python" -W ignore - <<'PY'
from whoosh import fields, qparser, query
from whoosh.filedb.filestore import RamStorage

PASSAGES = (
    ("breakfast", "bread butter and jam with one cup of tea"),
    ("coffee", "beans are roasted ground and then brewed hot"),
    ("how to brew tea", "boil fresh water pour it over tea leaves"),
    ("restaurants", "menus prices and opening hours of the town"),
    ("garden", "a shed to drink tea in after the work"),
)
TITLE = query.Term("title", "tea", boost=2.0)
TEXT = query.Term("text", "tea")

schema = fields.Schema(name=fields.STORED, title=fields.TEXT, text=fields.TEXT)
index = RamStorage().create_index(schema)
writer = index.writer()
for title, text in PASSAGES:
    writer.add_document(name=title, title=title, text=text)
writer.commit()


def found(searcher, query) -> dict[str, float]:
    return {hit["name"]: hit.score for hit in searcher.search(query, limit=None, optimize=False)}


def line(label: str, scores: dict[str, float]) -> None:
    order = sorted(scores, key=lambda name: -scores[name])
    print(f"{label:22}" + "   ".join(f"{name} {scores[name]:.2f}" for name in order))


with index.searcher() as searcher:
    titles = found(searcher, TITLE)
    texts = found(searcher, TEXT)
    line("title alone", titles)
    line("text alone", texts)
    parsed = qparser.DisMaxParser({"title": 2.0, "text": 1.0}, schema).parse("tea")
    for tiebreak, name, disjunction in (
        (0.0, "DisMaxParser", parsed),
        (0.5, "DisjunctionMax", query.DisjunctionMax([TITLE, TEXT], tiebreak=0.5)),
    ):
        by_hand = {}
        for passage in texts:
            scores = sorted((titles.get(passage, 0), texts[passage]))
            by_hand[passage] = scores[1] + tiebreak * scores[0]
        seen = found(searcher, disjunction)
        print(f"tiebreak {tiebreak}")
        line("  by hand", by_hand)
        line(f"  {name}", seen)
        assert max(by_hand, key=by_hand.get) == "how to brew tea"
        assert seen["breakfast"] == titles["how to brew tea"] > 2 * by_hand["breakfast"]
        assert seen["how to brew tea"] == titles["how to brew tea"]
        assert seen["garden"] == texts["garden"]
    both = found(searcher, qparser.MultifieldParser(["title", "text"], schema, {"title": 2.0}).parse("tea"))
    assert all(abs(both[name] - titles.get(name, 0) - texts[name]) < 1e-9 for name in texts)
PY
