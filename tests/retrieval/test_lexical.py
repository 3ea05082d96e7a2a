"""BM25 against the formula by hand, and the texts that have nothing in common with any passage."""

import math
import sys

import pytest

from r3lite.core.episode import Document, Question
from r3lite.core.errors import R3LiteError
from r3lite.retrieval import index
from r3lite.retrieval.encoder import HashingEncoder
from r3lite.retrieval.lexical import Lexical
from r3lite.retrieval.retriever import build_retriever
from r3lite.retrieval.setup import Setup
from r3lite.settings import RetrievalSettings
from tests.built_index import save
from tests.errors import raises

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

    hits = Lexical(DOCUMENTS).search(["Who was filming in a harbor?"], 3)[0]  # film, harbor: stemmed; no stop words
    expected = {"a": part(2, 1, 5) + part(2, 2, 5), "b": part(2, 1, 2), "c": part(2, 1, 3)}
    assert {d.id: d.score for d in hits} == pytest.approx(expected, rel=1e-5)
    assert [d.id for d in hits] == sorted(expected, key=expected.get, reverse=True)
    assert {d.source for d in hits} == {"lexical"}


def test_only_passages_that_share_a_word_are_found():
    lexical = Lexical(DOCUMENTS)
    assert [[d.id for d in row] for row in lexical.search(["red", "zebra", "", "the of", "zebra road"], 5)] == [
        ["c"], [], [], [], ["b", "c"]
    ]  # fmt: skip
    assert lexical.search([], 5) == []


SINGLE = [Document(n, "", f"Apollo {n} was flown by {who}.") for n, who in (("7", "Ann"), ("8", "Bob"), ("9", "Cem"))]
SINGLE += [Document(v, "", f"Vitamin {v} is in food.") for v in "AK"] + [Document("of", "", "Apollo's crew")]


def test_a_word_may_have_one_character():
    """Apollo 7, 8 and 9 were one, and vitamin A and K: the first passage came for all of them."""
    lexical = Lexical(SINGLE)
    queries = ["Apollo 9", "Who flew Apollo 8?", "vitamin K"]
    assert [row[0].id for row in lexical.search(queries, 1)] == ["9", "8", "K"]
    # Nor is the s of a possessive a word: it would stand in half of all passages.
    assert lexical.search(["s"], 5) == lexical.search(["Ann's"], 5, own_places=[(1, 5)]) == [[]]
    assert [document.id for document in Lexical([Document("d", "", "C\u00f4te d'Ivoire")]).search(["d"], 1)[0]] == ["d"]


def test_accents_and_widths_of_one_word_meet():
    """A letter with its accent and the same in two characters were two words."""
    texts = ["S\u00e3o Paulo", "Zu\u0308rich", "\uff34\uff4f\uff4b\uff59\uff4f", "the \ufb01sh"]
    queries = ["Sa\u0303o", "z\u00fcrich", "tokyo", "fish"]
    documents = [Document(str(i), "", text) for i, text in enumerate(texts)]
    hashing = index.build_index(HashingEncoder.fit(texts), documents)
    for results in (Lexical(documents).search(queries, 1), hashing.search(queries, 1)):
        assert [row[0].id for row in results] == ["0", "1", "2", "3"]


def test_of_equal_scores_the_first_passage_comes_first():
    copies = [Document(str(i), "", "blue harbor") for i in range(40)]
    for k in (1, 7, 40, 100):
        assert [d.id for d in Lexical(copies).search(["harbor"], k)[0]] == [str(i) for i in range(min(k, 40))]


def test_a_corpus_without_words_is_refused():
    with raises(R3LiteError, "corpus-without-words"):
        Lexical([Document("a", "", "?!"), Document("b", "The", "a")])


@pytest.mark.parametrize("name", ["lexical", "hybrid"])
@pytest.mark.parametrize("package", ["bm25s", "Stemmer"])
def test_without_its_packages_it_names_the_extra(monkeypatch, tmp_path, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "1", "title": "T", "text": "Oslo is here."}')
    settings = RetrievalSettings(retriever=name, encoder="hashing", corpus=str(corpus))
    with raises(R3LiteError, "package-missing", package) as error:
        build_retriever(Setup(settings, []))
    assert "pip install 'r3lite[retrieval]'" in error.value.remedy


def test_the_passages_of_an_index_are_searched_without_its_encoder(tmp_path, monkeypatch):
    save(tmp_path / "i", DOCUMENTS)
    monkeypatch.setattr(index, "make_encoder", lambda *_, **__: pytest.fail("an encoder was loaded"))
    settings = RetrievalSettings(retriever="lexical", index=str(tmp_path / "i"), encoder="no/such")
    assert build_retriever(Setup(settings, []))([(Question("q", "?", ()), "red")]) == [[DOCUMENTS[2]]]
    (tmp_path / "i" / "passages.jsonl").write_text('{"id": "a", "text": "another"}')
    with raises(R3LiteError, "corpus-shorter"):
        build_retriever(Setup(settings, []))
