"""The function that rollouts are handed, for every choice of retriever and corpus."""

import json
from typing import get_args, get_type_hints

import pytest

from r3lite.episode import Document, Question
from r3lite.errors import R3LiteError
from r3lite.retrieval import index
from r3lite.retrieval.encoder import make_encoder
from r3lite.retrieval.retriever import RETRIEVERS, build_retriever
from r3lite.settings import RetrievalSettings

HARBOR = Document("q1/0", "Blue Harbor", "Blue Harbor is a film directed by Ann Lee.")
LEE = Document("q1/1", "Ann Lee", "Ann Lee was born in Oslo.")
OSLO = Document("q2/0", "Oslo", "Oslo is the capital of Norway.")
ONE = Question("q1", "Where was the director of Blue Harbor born?", ("Oslo",), (HARBOR, LEE), gold=(LEE, HARBOR))
TWO = Question("q2", "What is the capital of Norway?", ("Oslo",), (OSLO, LEE))
HASHING = RetrievalSettings(encoder="hashing", top_k=1)


def retriever(questions=(ONE, TWO), **changes):
    settings = RetrievalSettings(**(vars(HASHING) | changes))
    return build_retriever(settings, list(questions), progress=False)


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps(d.to_json()) for d in (HARBOR, OSLO)))
    return str(path)


def test_the_questions_paragraphs_are_the_corpus_where_none_is_named():
    pairs = [(ONE, "Who directed Blue Harbor?"), (TWO, "Where was Ann Lee born?"), (ONE, "capital of Norway")]
    # Any question's paragraphs are found from any other question.
    assert retriever()(pairs) == [[HARBOR], [LEE], [OSLO]]


def test_a_corpus_and_an_index(corpus, tmp_path):
    asked = [(ONE, "Where was Ann Lee born?"), (TWO, "capital of Norway")]
    found = retriever(corpus=corpus)(asked)
    assert found == [[HARBOR], [OSLO]]
    documents = [HARBOR, OSLO]
    index.build(make_encoder("hashing", "auto", documents), documents, progress=False).save(tmp_path / "i")
    assert retriever(index=str(tmp_path / "i"))(asked) == found
    assert retriever(index=str(tmp_path / "i"), corpus=corpus)(asked) == found
    (tmp_path / "corpus.jsonl").write_text(json.dumps(LEE.to_json()))
    with pytest.raises(R3LiteError, match="was not built of the corpus"):
        retriever(index=str(tmp_path / "i"), corpus=corpus)


def test_bad_lines_of_a_corpus_are_skipped_on_demand(corpus, tmp_path):
    """--skip-bad-rows did not reach corpora."""
    with open(corpus, "a") as file:
        file.write("\n[1]\n")
    settings = RetrievalSettings(**(vars(HASHING) | {"corpus": corpus}))
    with pytest.raises(R3LiteError, match="line 3: not a JSON object"):
        build_retriever(settings, [ONE], progress=False)
    retrieve = build_retriever(settings, [ONE], progress=False, skip_bad_rows=True)
    assert retrieve([(ONE, "capital of Norway")]) == [[OSLO]]
    documents = [HARBOR, OSLO]
    index.build(make_encoder("hashing", "auto", documents), documents, progress=False).save(tmp_path / "i")
    settings = RetrievalSettings(**(vars(settings) | {"index": str(tmp_path / "i")}))
    assert build_retriever(settings, [ONE], skip_bad_rows=True)([(ONE, "capital of Norway")]) == [[OSLO]]


def test_equal_queries_are_encoded_once_and_one_call_is_one_batch(monkeypatch):
    retrieve, seen = retriever(), []
    encoder = retrieve.passages.encoder
    encode = encoder.encode_queries
    monkeypatch.setattr(encoder, "encode_queries", lambda queries: seen.append(list(queries)) or encode(queries))
    found = retrieve([(ONE, "Oslo"), (TWO, "Ann Lee"), (TWO, "Oslo")])
    assert seen == [["Oslo", "Ann Lee"]]
    assert found[0] == found[2]
    found[0].clear()  # what a caller does to one list is its own affair
    assert found[2]
    assert retrieve([]) == []


def test_golden_gives_the_question_its_own_gold_paragraphs():
    retrieve = retriever(retriever="golden")
    assert retrieve([(ONE, "anything"), (TWO, "x")]) == [[LEE, HARBOR], []]
    with pytest.raises(R3LiteError, match="no question in --data has any"):
        retriever([TWO], retriever="golden")


def test_none_gives_nothing():
    assert retriever(retriever="none")([(ONE, "x"), (TWO, "y")]) == [[], []]


def test_without_any_passages_it_says_what_to_pass():
    with pytest.raises(R3LiteError, match="come without paragraphs") as error:
        retriever([Question("q", "?", ("a",))])
    assert "--corpus FILE.jsonl" in error.value.remedy


def test_every_retriever_can_be_chosen():
    assert set(RETRIEVERS) == set(get_args(get_type_hints(RetrievalSettings)["retriever"]))


def test_a_query_without_any_known_word_brings_nothing():
    assert retriever()([(ONE, "zebra"), (TWO, "capital of Norway"), (ONE, "?!")]) == [[], [OSLO], []]
