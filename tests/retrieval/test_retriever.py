"""The function that rollouts are handed, for every choice of retriever and corpus."""

import json

import pytest

from r3lite.core.config import UsageError
from r3lite.core.episode import Document, Failure, Question, Search, retrieve_all
from r3lite.core.errors import R3LiteError
from r3lite.retrieval import index, setup
from r3lite.retrieval.retriever import GIVE_UP, RETRIEVERS, Tolerant, build_retriever
from r3lite.retrieval.setup import Setup
from r3lite.settings import RetrievalSettings
from r3lite.settings.retrieval import RETRIEVERS as NAMES
from tests.built_index import save
from tests.errors import raises

HARBOR = Document("q1/0", "Blue Harbor", "Blue Harbor is a film directed by Ann Lee.")
LEE = Document("q1/1", "Ann Lee", "Ann Lee was born in Oslo.")
OSLO = Document("q2/0", "Oslo", "Oslo is the capital of Norway.")
ONE = Question("q1", "Where was the director of Blue Harbor born?", ("Oslo",), (HARBOR, LEE), gold=(LEE, HARBOR))
TWO = Question("q2", "What is the capital of Norway?", ("Oslo",), (OSLO, LEE))
HASHING = RetrievalSettings(encoder="hashing", top_k=1)


def retriever(questions=(ONE, TWO), **changes):
    settings = RetrievalSettings(**(vars(HASHING) | changes))
    return build_retriever(Setup(settings, list(questions)))


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
    pairs = [(ONE, "Where was Ann Lee born?"), (TWO, "capital of Norway")]
    rankings = retriever(corpus=corpus)(pairs)
    assert rankings == [[HARBOR], [OSLO]]
    documents = [HARBOR, OSLO]
    save(tmp_path / "i", documents)
    assert retriever(index=str(tmp_path / "i"))(pairs) == rankings
    assert retriever(index=str(tmp_path / "i"), corpus=corpus)(pairs) == rankings
    (tmp_path / "corpus.jsonl").write_text(json.dumps(LEE.to_json()))
    with raises(R3LiteError, "index-corpus-differs"):
        retriever(index=str(tmp_path / "i"), corpus=corpus)


def test_kinds_of_sources_have_indexes_of_their_own(corpus, tmp_path):
    save(tmp_path / "news", [LEE])
    routes = retriever(corpus=corpus, source_index=(f"News={tmp_path / 'news'}",))
    pair = (ONE, "Oslo")
    assert routes([pair]) == [[OSLO]] and routes.by_kind["News"]([pair]) == [[LEE]]
    searches = [(ONE, Search(pair[1], kind=source)) for source in ("News", "General", "", "News")]
    assert retrieve_all(routes, searches) == [[LEE], [OSLO], [OSLO], [LEE]]


def test_one_reranker_serves_all_sources(corpus, tmp_path, monkeypatch):
    loaded = []
    monkeypatch.setattr(setup, "CrossEncoder", lambda *args: loaded.append(args))
    for name in ("news", "papers"):
        save(tmp_path / name, [LEE])
    sources = (f"News={tmp_path / 'news'}", f"Academic={tmp_path / 'papers'}")
    retriever(corpus=corpus, rerank="mine", source_index=sources)
    assert loaded == [("mine", "fp32")]


def test_one_encoder_serves_the_indexes_of_all_sources(minilm, tmp_path, monkeypatch):
    loaded = []
    for name, documents in (("all", [HARBOR, OSLO]), ("news", [LEE])):
        save(tmp_path / name, documents, str(minilm), "plain")
    make = index.make_encoder
    monkeypatch.setattr(index, "make_encoder", lambda *args, **named: loaded.append(args) or make(*args, **named))
    settings = {"encoder": str(minilm), "index": str(tmp_path / "all"), "source_index": (f"News={tmp_path / 'news'}",)}
    routes = retriever(**settings)
    assert len(loaded) == 1
    assert routes.by_kind["News"]([(ONE, "Ann Lee")]) == [[LEE]] and routes([(ONE, "Oslo")]) == [[OSLO]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source_index": ("Sport=x",)}, "write it as News=FOLDER; kinds are General, News, Academic"),
        ({"source_index": ("News=",)}, "write it as News=FOLDER"),
        ({"source_index": ("News=x", "News=y")}, "has a kind of source twice"),
        ({"source_index": ("News=ftp://x",)}, "is not an http or https address"),
    ],
)
def test_sources_that_contradict_are_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        RetrievalSettings(**settings).check()


def test_sources_have_retrievers_of_their_own():
    settings = RetrievalSettings(source_index=("News=x", "Academic=http://host/retrieve"))
    settings.check()
    by_kind = settings.by_kind
    assert (by_kind["News"].index, by_kind["News"].retriever) == ("x", "semantic")
    assert (by_kind["Academic"].index, by_kind["Academic"].retriever) == (None, "http://host/retrieve")


def test_bad_lines_of_a_corpus_are_skipped_on_demand(corpus, tmp_path):
    """--skip-bad-rows did not reach corpora."""
    with open(corpus, "a") as file:
        file.write("\n[1]\n")
    settings = RetrievalSettings(**(vars(HASHING) | {"corpus": corpus}))
    with pytest.raises(R3LiteError, match="line 3: not a JSON object"):
        build_retriever(Setup(settings, [ONE]))
    retrieve = build_retriever(Setup(settings, [ONE], skip_bad_rows=True))
    assert retrieve([(ONE, "capital of Norway")]) == [[OSLO]]
    documents = [HARBOR, OSLO]
    save(tmp_path / "i", documents)
    settings = RetrievalSettings(**(vars(settings) | {"index": str(tmp_path / "i")}))
    assert build_retriever(Setup(settings, [ONE], skip_bad_rows=True))([(ONE, "capital of Norway")]) == [[OSLO]]


@pytest.mark.parametrize(("context", "first"), [("corpus", ONE), ("question", TWO)])
def test_equal_queries_are_encoded_once_and_one_call_is_one_batch(monkeypatch, context, first):
    retrieve = retriever(context=context)
    batches = []
    encoder = retrieve.retrieve.passages.encoder
    encode = encoder.encode_queries
    monkeypatch.setattr(encoder, "encode_queries", lambda queries: batches.append(list(queries)) or encode(queries))
    rankings = retrieve([(first, "Oslo"), (TWO, "Ann Lee"), (TWO, "Oslo")])
    assert batches == [["Oslo", "Ann Lee"]]
    assert rankings[0] == rankings[2]
    rankings[0].clear()  # what a caller does to one list is its own affair
    assert rankings[2]
    assert retrieve([]) == []


def test_none_gives_nothing():
    assert retriever(retriever="none")([(ONE, "x"), (TWO, "y")]) == [[], []]


def test_without_any_passages_it_says_what_to_pass():
    with raises(R3LiteError, "nothing-to-search") as error:
        retriever([Question("q", "?", ("a",))])
    assert "--corpus FILE.jsonl" in error.value.remedy


def test_every_document_says_what_brought_it_and_how_well():
    pair = (ONE, "Who directed Blue Harbor, a film?")
    for name, sources in (("semantic", {"semantic"}), ("lexical", {"lexical"}), ("hybrid", {"semantic+lexical"})):
        (documents,) = retriever(retriever=name, top_k=3)([pair])
        assert documents[0] == HARBOR and documents[0].source in sources
        assert [d.score for d in documents] == sorted((d.score for d in documents), reverse=True)
    (documents,) = retriever(retriever="hybrid", top_k=3)([pair])
    assert {d.source for d in documents} == {"semantic+lexical", "semantic"}  # the others share no word with the query
    assert documents[0].to_json() == HARBOR.to_json()  # files have passages only


@pytest.mark.parametrize("name", ["semantic", "lexical", "hybrid"])
def test_with_context_question_only_its_own_paragraphs_are_searched(name):
    retrieve = retriever(retriever=name, context="question", top_k=5)
    query = "capital of Norway, born in Oslo"
    one, two = retrieve([(ONE, query), (TWO, query)])
    assert one[0] == LEE and set(one) <= {HARBOR, LEE}
    assert two[0] == OSLO and set(two) <= {OSLO, LEE}
    assert [d.score for d in two] == sorted((d.score for d in two), reverse=True)
    assert {d.id for d in retriever(retriever=name, top_k=5)([(ONE, query)])[0]} > {d.id for d in one}


def test_context_question_needs_paragraphs_and_no_corpus():
    with raises(R3LiteError, "context-without-paragraphs", "bare"):
        retriever([ONE, Question("bare", "?", ("a",))], context="question")


class Flaky:
    """A retriever that fails at some queries, and at many together."""

    def __init__(self, error):
        self.error, self.calls = error, 0

    def __call__(self, pairs):
        self.calls += 1
        if any(query == "bad" for _, query in pairs):
            raise self.error
        return [[HARBOR] for _ in pairs]


def test_a_failure_is_the_outcome_of_its_own_query_only(capsys):
    """It would end a run of hours."""
    for error, reason in (
        (R3LiteError("no such thing", "Mend it.", code="broken"), "no such thing"),
        (RuntimeError("can't allocate memory"), "RuntimeError: can't allocate memory"),
        (OSError("gone"), "OSError: gone"),
    ):
        flaky = Flaky(error)
        retrieve = Tolerant(flaky)
        assert retrieve([(ONE, "a"), (ONE, "bad"), (TWO, "b")]) == [[HARBOR], Failure(reason), [HARBOR]]
        assert flaky.calls == 4  # all, then each alone
        assert capsys.readouterr().err == f"warning: the retriever failed: {reason}\n"
        assert retrieve([(ONE, "bad")]) == [Failure(reason)]
        assert capsys.readouterr().err == ""  # the same reason is told once
    with pytest.raises(KeyError):  # a bug of ours
        Tolerant(Flaky(KeyError("x")))([(ONE, "bad")])


def test_a_retriever_that_only_fails_stops_the_run():
    """It would go on for hours and learn nothing."""
    retrieve = Tolerant(Flaky(OSError("gone")))
    for _ in range(2):  # a query that succeeds starts the count anew
        assert len(retrieve([(ONE, "bad")] * (GIVE_UP - 1))) == GIVE_UP - 1
        retrieve([(ONE, "good")])
    with raises(R3LiteError, "retriever-failed", GIVE_UP, "OSError: gone"):
        retrieve([(ONE, "bad")] * GIVE_UP)


def test_a_server_goes_on_however_many_queries_fail():
    retrieve = Tolerant(Flaky(OSError("gone")), gives_up=False)
    assert retrieve([(ONE, "bad")] * (GIVE_UP + 1)) == [Failure("OSError: gone")] * (GIVE_UP + 1)
    server_retriever = build_retriever(Setup(RetrievalSettings(retriever="none"), [], gives_up=False))
    assert not server_retriever.gives_up


def test_the_settings_name_every_retriever():
    assert tuple(RETRIEVERS) == NAMES


def test_a_query_without_any_known_word_brings_nothing():
    assert retriever()([(ONE, "zebra"), (TWO, "capital of Norway"), (ONE, "?!")]) == [[], [OSLO], []]
