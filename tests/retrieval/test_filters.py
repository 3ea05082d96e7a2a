"""Conditions on metadata: what fits, what is searched then in every kind of index, and what is refused."""

import json

import numpy as np
import pytest

from r3lite import index as recipe
from r3lite import retrieve
from r3lite.core.config import UsageError
from r3lite.core.episode import Document, Question
from r3lite.core.errors import R3LiteError
from r3lite.core.files import write_jsonl
from r3lite.core.invocation import resolve
from r3lite.core.needs import check_used
from r3lite.retrieval import index
from r3lite.retrieval.corpus import fingerprint, read_corpus
from r3lite.retrieval.encoder import HashingEncoder
from r3lite.retrieval.retriever import build_retriever
from r3lite.retrieval.setup import Setup, filter_mask
from r3lite.retrieval.vectors import CLASSES
from r3lite.settings import RetrievalSettings
from tests.built_index import encoder_settings
from tests.errors import shows

FIELDS = [
    {"lang": "en", "year": 1999, "free": True, "part": "[a]?"},
    {"lang": "EN-gb", "year": 2020.5, "free": False},
    {"lang": "de", "year": 2021},
    {},
]
DOCUMENTS = [Document(f"notes/{i}", f"T{i}", "x", metadata=tuple(fields.items())) for i, fields in enumerate(FIELDS)]


@pytest.mark.parametrize(
    ("conditions", "matches"),
    [
        (["lang=en"], [0]),
        (["lang=EN*"], [0, 1]),
        (["lang!=en*"], [2]),  # the last one has no language, and fits no condition on it
        (["year>=2020"], [1, 2]),
        (["year > 2020.5"], [2]),
        (["year<2020.5"], [0]),
        (["year<=2020.5", "lang=en*"], [0, 1]),
        (["year=1999.0"], [0]),
        (["year!=1999"], [1, 2]),
        (["free=true"], [0]),
        (["free!=TRUE"], [1]),
        (["id=notes/*", "title=*1"], [1]),
        (["part=[A]?"], [0]),
        (["title>t1"], [2, 3]),
        (["part!=[a]"], [0]),
    ],
)
def test_what_fits(conditions, matches):
    assert np.flatnonzero(filter_mask(conditions, DOCUMENTS)).tolist() == matches


@pytest.mark.parametrize(
    ("conditions", "words"),
    [
        (["lnag=en"], "no passage has the field 'lnag' .did you mean lang."),
        (["lang=en", "year>3000"], "no passage matches --filter lang=en, year>3000"),
        (["year>=new"], "year is a number"),
    ],
)
def test_a_filter_that_lets_nothing_through_is_an_error(conditions, words):
    with pytest.raises(R3LiteError, match=words) as error:
        filter_mask(conditions, DOCUMENTS)
    assert "lnag" not in words or error.value.remedy == "Known fields: free, id, lang, part, title, year."


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--filter", "lang"], "write it as lang=en"),
        (["--filter", "lang=="], "write it as lang=en"),
        (["--filter", "a=b", "--retriever", "http://h/retrieve"], "--filter is .* has no effect"),
        (["--filter", "a=b", "--retriever", "golden"], "--filter is .* has no effect"),
        (["--filter", "a=b", "--context", "question"], "it needs --context corpus"),
    ],
)
def test_settings_that_make_no_sense(flags, words):
    config = resolve("retrieve", retrieve.RetrieveConfig(), flags)
    with pytest.raises(UsageError, match=words):
        config.retrieval.check()
        check_used("retrieve", config)


def row(i):
    colour = ("red", "green", "blue")[i % 3]
    text = f"House {i} is in street {i % 7}."
    return {"id": f"h{i}", "title": "", "text": text, "metadata": {"colour": colour, "rooms": i % 5, "tags": ["a"]}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("filtered") / "c.jsonl"
    write_jsonl(path, [row(i) for i in range(400)])
    return path


def searched(settings, query="House 7 in street 3"):
    (documents,) = build_retriever(Setup(settings, []))([(Question("q", query, ()), query)])
    return documents


def expected(corpus, k, keep):
    """The best scores of a search of everything, by brute force."""
    documents = read_corpus(corpus)
    full_index = index.build_index(HashingEncoder.fit(d.text for d in documents), documents)
    return [d.score for d in full_index.search(["House 7 in street 3"], 400)[0] if keep(**dict(d.metadata))][:k]


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if kind != "opq-ivf-pq"])  # which needs 10,000 passages
def test_an_index_is_searched_as_if_it_had_nothing_else(corpus, tmp_path, kind):
    argv = ["--corpus", str(corpus), "--encoder", "hashing", "--index-type", kind, "--output", str(tmp_path / "i")]
    assert recipe.main(argv) == 0
    settings = RetrievalSettings(
        index=str(tmp_path / "i"), encoder="hashing", filter=("colour=red", "rooms>=2"), top_k=4
    )
    documents = searched(settings)
    assert documents and all(dict(d.metadata)["colour"] == "red" and dict(d.metadata)["rooms"] >= 2 for d in documents)
    if kind == "flat":
        best = expected(corpus, 4, lambda colour, rooms: colour == "red" and rooms >= 2)
        assert [d.score for d in documents] == pytest.approx(best, abs=1e-6)
    assert set(documents) <= set(read_corpus(corpus))


def test_what_was_added_and_deleted_is_filtered_too(corpus, tmp_path):
    options = ["--encoder", "hashing", "--output", str(tmp_path / "i")]
    assert recipe.main(["--corpus", str(corpus), *options]) == 0
    write_jsonl(tmp_path / "more.jsonl", [row(i) for i in range(400, 430)])
    gone = [f"h{i}" for i in range(0, 430, 4)]
    assert recipe.main(["--add", str(tmp_path / "more.jsonl"), *options]) == 0
    assert recipe.main(["--delete", ",".join(gone), *options]) == 0
    opened = index.load(tmp_path / "i", encoder_settings())
    mask = filter_mask(["colour=blue"], opened.documents)
    only = opened.only(mask)
    assert [d.id for d in only.documents] == [f"h{i}" for i in range(430) if i % 3 == 2 and i % 4]
    ranked = opened.search(["House 401 in street 3"], 430)[0]
    blue = [(d.id, d.score) for d in ranked if dict(d.metadata)["colour"] == "blue"]
    assert [(d.id, d.score) for d in only.search(["House 401 in street 3"], 500)[0]] == blue
    assert len(opened.documents) == 322 and len(opened.search(["House"], 430)[0]) == 322  # itself it stays whole


@pytest.mark.parametrize("retriever", ["semantic", "lexical", "hybrid"])
@pytest.mark.parametrize("source", ["corpus", "index"])
def test_every_retriever_keeps_to_it(corpus, tmp_path, retriever, source):
    if source == "index":
        assert recipe.main(["--corpus", str(corpus), "--encoder", "hashing", "--output", str(tmp_path / "i")]) == 0
    place = {"index": str(tmp_path / "i")} if source == "index" else {"corpus": str(corpus)}
    settings = RetrievalSettings(retriever=retriever, encoder="hashing", filter=("id=h1*", "colour=gr*"), **place)
    documents = searched(settings)
    assert len(documents) == 5 and all(
        d.id.startswith("h1") and dict(d.metadata)["colour"] == "green" for d in documents
    )


def test_metadata_is_read_kept_and_counts_as_part_of_a_passage(corpus):
    first = read_corpus(corpus)[0]
    assert first.metadata == (("colour", "red"), ("rooms", 0))  # of the rest nothing can be asked
    assert first.to_json()["metadata"] == {"colour": "red", "rooms": 0}
    bare = Document(first.id, first.title, first.text)
    assert bare != first and "metadata" not in bare.to_json()
    assert fingerprint([bare]) != fingerprint([first])
    # That of a corpus without metadata is what it was before there was any.
    assert fingerprint([bare]) == "1277cbad6d73258e4919bcd3cb327437bb222da0f7733022d372ef9c71517350"


def test_a_passage_that_is_added_with_other_metadata_is_another_one(corpus, tmp_path, capsys):
    options = ["--encoder", "hashing", "--output", str(tmp_path / "i")]
    assert recipe.main(["--corpus", str(corpus), *options]) == 0
    write_jsonl(tmp_path / "more.jsonl", [row(0) | {"metadata": {"colour": "black"}}])
    assert recipe.main(["--add", str(tmp_path / "more.jsonl"), *options]) == 1
    assert shows(capsys.readouterr().err, "passage-id-taken", "'h0'")
    assert json.loads((tmp_path / "i" / "passages.jsonl").read_text().splitlines()[0])["metadata"]["colour"] == "red"
