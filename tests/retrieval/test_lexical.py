"""BM25 against the formula by hand, and the texts that have nothing in common with any passage."""

import math
import sys

import pytest

from r3lite.core.episode import Document, Question
from r3lite.core.errors import R3LiteError
from r3lite.retrieval import index
from r3lite.retrieval.lexical import Lexical
from r3lite.retrieval.retriever import build_retriever
from r3lite.retrieval.setup import Setup
from r3lite.settings import RetrievalSettings
from tests.built_index import save

DOCUMENTS = [
    Document("a", "Blue Harbor", "The films of Blue Harbor"),  # blue harbor film blue harbor
    Document("b", "Harbor", "A road"),  # harbor road
    Document("c", "", "It was filmed on the road, in red"),  # film road red
]


def test_scores_are_those_of_the_formula():
    """Lucene's BM25: idf = ln(1 + (N - n + 0.5) / (n + 0.5)), tf / (tf + k1 (1 - b + b length / mean length))."""

    def part(n, tf, length):
        idf = math.log(1 + (3 - n + 0.5) / (n + 0.5))
        return idf * tf / (tf + 1.5 * (0.25 + 0.75 * length / (10 / 3)))

    found = Lexical(DOCUMENTS).search(["Who was filming in a harbor?"], 3)[0]  # film, harbor: stemmed; no stop words
    expected = {"a": part(2, 1, 5) + part(2, 2, 5), "b": part(2, 1, 2), "c": part(2, 1, 3)}
    assert {d.id: d.score for d in found} == pytest.approx(expected, rel=1e-5)
    assert [d.id for d in found] == sorted(expected, key=expected.get, reverse=True)
    assert {d.source for d in found} == {"lexical"}


def test_only_passages_that_share_a_word_are_found():
    lexical = Lexical(DOCUMENTS)
    assert [[d.id for d in row] for row in lexical.search(["red", "zebra", "", "the of", "zebra road"], 5)] == [
        ["c"], [], [], [], ["b", "c"]
    ]  # fmt: skip
    assert lexical.search([], 5) == []


def test_of_equal_scores_the_first_passage_comes_first():
    same = [Document(str(i), "", "blue harbor") for i in range(40)]
    for k in (1, 7, 40, 100):
        assert [d.id for d in Lexical(same).search(["harbor"], k)[0]] == [str(i) for i in range(min(k, 40))]


def test_a_corpus_without_words_is_refused():
    with pytest.raises(R3LiteError, match="no passage has a word for BM25"):
        Lexical([Document("a", "", "?!"), Document("b", "The", "a")])


@pytest.mark.parametrize("name", ["lexical", "hybrid"])
@pytest.mark.parametrize("package", ["bm25s", "Stemmer"])
def test_without_its_packages_it_names_the_extra(monkeypatch, tmp_path, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "1", "title": "T", "text": "Oslo is here."}')
    settings = RetrievalSettings(retriever=name, encoder="hashing", corpus=str(corpus))
    with pytest.raises(R3LiteError, match=f"needs the package {package}, which is not installed") as error:
        build_retriever(Setup(settings, []))
    assert "pip install 'r3lite[retrieval]'" in error.value.remedy


def test_the_passages_of_an_index_are_searched_without_its_encoder(tmp_path, monkeypatch):
    save(tmp_path / "i", DOCUMENTS)
    monkeypatch.setattr(index, "make_encoder", lambda *_: pytest.fail("an encoder was loaded"))
    settings = RetrievalSettings(retriever="lexical", index=str(tmp_path / "i"), encoder="no/such")
    assert build_retriever(Setup(settings, []))([(Question("q", "?", ()), "red")]) == [[DOCUMENTS[2]]]
    (tmp_path / "i" / "passages.jsonl").write_text('{"id": "a", "text": "another"}')
    with pytest.raises(R3LiteError, match="is shorter than when it was indexed"):
        build_retriever(Setup(settings, []))
