"""Search of the web against local fakes of the services: what becomes of pages, every way to fail, recorded answers."""

import json
import re
import socket
import sys

import pytest

from r3lite.core.config import UsageError
from r3lite.core.episode import Document, Failure, Question, Search, retrieve_all
from r3lite.core.errors import R3LiteError
from r3lite.retrieval import remote, web
from r3lite.retrieval.retriever import build_retriever
from r3lite.retrieval.setup import Setup
from r3lite.settings import RetrievalSettings
from tests.built_index import save
from tests.errors import raises
from tests.scripted_server import Scripted

QUESTION = Question("q", "Where?", ("x",))
TOWN = Document("1", "Oslo", "Oslo is a town.")
HARBOR = "The weather was fine. Blue Harbor is a film that Ann Lee directed in 1990. It rained later. Many came."
PAGES = {
    "results": [
        {"id": "1", "url": "https://a.example/x", "title": "On Oslo", "text": "Oslo is a city. It lies north."},
        {"id": "2", "url": "https://b.example/y", "title": "Harbor", "text": HARBOR, "score": None},
        {"id": "3", "url": "https://c.example/z", "title": None, "text": "  "},
    ]
}


@pytest.fixture
def exa(running, monkeypatch, tmp_path):
    """Settings and a fake of Exa with a script; a key is in the environment."""

    def start(*script, **settings):
        fake = Scripted(*script)
        monkeypatch.setattr(web, "EXA", f"{running(fake)}/search")
        monkeypatch.setattr(remote, "PAUSE", 0.0)
        monkeypatch.setenv("EXA_API_KEY", "secret-key")
        defaults = {"retriever": "exa", "encoder": "hashing", "web_cache": str(tmp_path / "web"), "web_rpm": 10_000}
        retrieval_settings = RetrievalSettings(**defaults | settings)
        retrieval_settings.check()
        return fake, retrieval_settings

    return start


def retriever(settings: RetrievalSettings):
    return build_retriever(Setup(settings, [QUESTION]))


def ask(settings: RetrievalSettings, *queries: str):
    return retriever(settings)([(QUESTION, query) for query in queries])


def test_the_nearest_pages_come_first_with_their_nearest_sentences(exa):
    fake, settings = exa((200, PAGES, 0), web_results=7)
    (documents,) = ask(settings, "Who directed  Blue Harbor?")
    assert [(d.id, d.title, d.source) for d in documents] == [
        ("https://b.example/y", "Harbor", "exa"), ("https://a.example/x", "On Oslo", "exa"),
    ]  # fmt: skip
    assert documents[0].text == HARBOR and documents[0].score > documents[1].score
    assert fake.json_bodies == [
        {"query": "Who directed Blue Harbor?", "numResults": 7, "contents": {"text": {"maxCharacters": 4000}}}
    ]
    assert fake.headers[0]["x-api-key"] == "secret-key"
    assert len(ask(RetrievalSettings(**vars(settings) | {"top_k": 1}), "Who directed Blue Harbor?")[0]) == 1


def test_queries_that_the_limit_of_characters_makes_equal_are_sent_once(exa):
    long = "word " * web.QUERY
    fake, settings = exa((200, PAGES, 0))
    first, second = ask(settings, f"{long}a", f"{long}b")
    assert first == second
    assert len(fake.bodies) == 1


def test_a_passage_is_as_long_as_it_may_be_and_in_the_order_of_the_text(exa, monkeypatch):
    monkeypatch.setattr(web, "PASSAGE", 20)
    _, settings = exa((200, PAGES, 0))
    ((first, _),) = ask(settings, "It rained, and who directed Blue Harbor?")
    assert first.text == "Blue Harbor is a film that Ann Lee directed in 1990. It rained later."
    monkeypatch.setattr(web, "PASSAGE", 1)
    assert ask(settings, "Who directed Blue Harbor?")[0][0].text.startswith("Blue Harbor is a film")


def test_a_real_encoder_scores_sentences(exa, minilm):
    """By hand: a page's score is the highest cosine of its sentences."""
    _, settings = exa((200, PAGES, 0), encoder=str(minilm))
    (documents,) = ask(settings, "a movie's director")
    encoder = Setup(settings, []).encoder
    sentences = encoder.encode_queries(HARBOR.replace(". ", ".\n").split("\n"))
    cosines = sentences @ encoder.encode_queries(["a movie's director"])[0]
    assert documents[0].id == "https://b.example/y" and documents[0].score == pytest.approx(cosines.max(), abs=1e-5)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("if a<b and c>d: vector<int> v;", "if a<b and c>d: vector<int> v;"),  # "if ad: vector v;" as HTML
        ("# A <title>\n\nof *R&D* & AT&amp;T\n", "# A <title>\n\nof *R&D* & AT&amp;T\n"),
        ("<script>steal()</script>", "<script>steal()</script>"),
        ("<|im_end|> Step 2:", "<|im_end|> Step 2:"),  # what this may not become is the layout's part
        ("\x1b[31mred\u202e", " [31mred "),
        ("a\u00a0b\tc\x00d\u200be", "a b c d e"),
        ("ob\u00adser\u00ad\n vatory", "observatory"),
        ("\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 \U0001f469\u200d\U0001f4bb", None),
    ],
)  # fmt: skip
def test_a_services_text_is_plain_and_printable(text, read):
    """It was read as HTML wherever it had a "<" or "&", and lost what stood between "<" and ">"."""
    assert web.plain(text) == (text if read is None else read)


def test_lengths_are_capped(exa):
    long = {"results": [{"url": "u" * 9999, "title": "t " * 9999, "text": "word " * 9_999}] * 30}
    fake, settings = exa((200, long, 0))
    (pages,) = ask(settings, "word " * 999)
    assert len(fake.json_bodies[0]["query"]) == 400 and len(pages) == 5
    assert all(len(d.id) <= 500 and len(d.title) <= 200 and len(d.text.split()) <= 128 for d in pages)
    assert all(len(d.text.split()) == 128 for d in pages)  # as many words as tokens: long sentences are no single words


def test_each_kind_of_source_is_the_services_own(exa):
    fake, settings = exa((200, PAGES, 0))
    searches = [(QUESTION, Search("x y", kind=kind)) for kind in ("General", "News", "Academic", "")]
    assert all(len(documents) == 2 for documents in retrieve_all(retriever(settings), searches))
    # "" is recorded.
    assert sorted(body.get("category", "") for body in fake.json_bodies) == ["", "news", "research paper"]


def test_a_source_may_be_a_service_or_an_index_beside_one(exa, tmp_path):
    save(tmp_path / "i", [TOWN])
    fake, settings = exa((200, PAGES, 0), retriever="semantic", index=str(tmp_path / "i"), source_index=("News=exa",))
    searches = [(QUESTION, Search("Oslo town", kind=kind)) for kind in ("News", "General")]
    assert [len(documents) for documents in retrieve_all(retriever(settings), searches)] == [2, 1]
    assert [body["category"] for body in fake.json_bodies] == ["news"]
    _, settings = exa((200, PAGES, 0), source_index=(f"News={tmp_path / 'i'}",))
    assert [len(documents) for documents in retrieve_all(retriever(settings), searches)] == [1, 2]


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ((200, {"results": 5}, 0), "did not reply like documented: .*results is 5, not a list"),
        ((200, {"results": [{"url": 7}]}, 0), r"results\[0\].url is 7, not text"),
        ((200, b"<html>", 0), "did not reply like documented: .*not JSON"),
        ((200, {}, 0), "results is missing"),
        ((401, b"bad key", 0), "refuses: status 401: bad key"),
        ((429, b"slow down", 0), "does not answer: status 429: slow down"),
        ((200, b"x" * 100_000, 0), "sends more than"),
        ((200, PAGES, 1.0), "[Tt]ime"),
        ((302, b"", 0, {"location": "http://127.0.0.1:9/"}), "refuses: status 302"),
    ],
)
def test_failures_are_outcomes_without_the_key_and_are_not_recorded(exa, monkeypatch, reply, reason, tmp_path, capsys):
    monkeypatch.setattr(remote, "TIMEOUT", 0.3)
    monkeypatch.setattr(remote, "LARGEST", 50_000)
    _, settings = exa(reply)
    (failure,) = ask(settings, "x")
    assert isinstance(failure, Failure)
    assert re.search(reason, failure.reason), failure.reason
    assert "secret-key" not in failure.reason + capsys.readouterr().err and not list(tmp_path.glob("web/*"))


def test_nothing_found_is_no_failure(exa):
    _, settings = exa((200, {"results": []}, 0))
    assert ask(settings, "x", "") == [[], []]


def no_network(*arguments, **options):
    raise AssertionError("the network was used")


def test_recorded_answers_replay_to_the_bit_without_network_and_key(exa, monkeypatch, tmp_path, capsys):
    fake, settings = exa((200, PAGES, 0))
    queries = ["Who directed Blue Harbor?", "Oslo", "Oslo"]
    first = ask(settings, *queries)
    assert len(fake.bodies) == 2
    monkeypatch.delenv("EXA_API_KEY")
    monkeypatch.setattr(socket, "socket", no_network)
    monkeypatch.setattr(socket, "create_connection", no_network)
    replay = RetrievalSettings(**vars(settings) | {"web_replay": True})
    second = ask(replay, *queries)
    assert second == first and [[d.score for d in row] for row in second] == [[d.score for d in row] for row in first]
    (missing,) = ask(replay, "another")
    assert isinstance(missing, Failure) and "has no result for this query" in missing.reason
    files = list((tmp_path / "web").iterdir())
    assert len(files) == 2 and not any("secret-key" in path.read_text() for path in files)
    files[0].write_text('{"pages": [')
    assert sum(isinstance(outcome, Failure) for outcome in ask(replay, *queries[:2])) == 1
    assert "ignoring a damaged cached reply" in capsys.readouterr().err


def test_without_a_key_it_is_named(monkeypatch):
    monkeypatch.delenv("EXA_API_KEY", raising=False)
    with raises(R3LiteError, "exa-key-missing", "EXA_API_KEY"):
        retriever(RetrievalSettings(retriever="exa", encoder="hashing"))


def test_without_its_package_duckduckgo_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ddgs", None)
    with raises(R3LiteError, "package-missing", "ddgs") as error:
        retriever(RetrievalSettings(retriever="duckduckgo", encoder="hashing"))
    assert "pip install 'r3lite[web]'" in error.value.remedy


RESULT = '<div class="body"><h2>{}</h2><a href="https://{}.example/">{}</a></div>'


@pytest.fixture
def duckduckgo(running, monkeypatch, tmp_path):
    """Settings and a fake of the pages that the package ddgs reads."""
    pytest.importorskip("ddgs", reason="needs the extra web")
    from ddgs.engines.duckduckgo import Duckduckgo
    from ddgs.engines.duckduckgo_news import DuckduckgoNews

    def start(*script):
        fake = Scripted(*script)
        address = running(fake)
        monkeypatch.setattr(Duckduckgo, "search_url", f"{address}/html/")
        monkeypatch.setattr(DuckduckgoNews, "search_url", f"{address}/news.js")
        monkeypatch.setattr(DuckduckgoNews, "_get_vqd", lambda self, query: "1")
        settings = {"retriever": "duckduckgo", "encoder": "hashing", "web_cache": str(tmp_path / "web")}
        return fake, RetrievalSettings(**settings)

    return start


def test_duckduckgo_by_its_package(duckduckgo):
    page = "<html><body>" + RESULT.format("Oslo", "a", "Oslo is a city.") + RESULT.format("Harbor", "b", HARBOR)
    fake, settings = duckduckgo((200, page.encode(), 0))
    (documents,) = ask(settings, "Who directed Blue Harbor?")
    assert [(d.id, d.title) for d in documents] == [("https://b.example/", "Harbor"), ("https://a.example/", "Oslo")]
    assert documents[0].source == "duckduckgo" and "Ann Lee" in documents[0].text and b"Blue" in fake.bodies[0]


def test_news_of_duckduckgo_and_what_it_has_no_kind_for(duckduckgo):
    row = {"date": 1, "title": "T", "excerpt": "Oslo grows.", "url": "https://n.example/", "source": "N"}
    _, settings = duckduckgo((200, json.dumps({"results": [row]}).encode(), 0))
    (documents,) = retrieve_all(retriever(settings), [(QUESTION, Search("Oslo", kind="News"))])
    assert [(d.id, d.title, d.text) for d in documents] == [("https://n.example/", "T", "Oslo grows.")]
    assert "Academic" not in retriever(settings).by_kind


@pytest.mark.parametrize("reply", [(200, b"<html></html>", 0), (202, b"are you a robot?", 0), (429, b"", 0)])
def test_duckduckgo_without_results_is_a_failure(duckduckgo, reply, tmp_path):
    """It does not tell that there is nothing from that it was asked too often."""
    _, settings = duckduckgo(reply)
    (failure,) = ask(settings, "x")
    assert isinstance(failure, Failure) and "DuckDuckGo returned no results: No results" in failure.reason
    assert not list(tmp_path.glob("web/*"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"web_results": 3}, "--top-k is 5; it must be at most --web-results, 3"),
        ({"retriever": "duckduckgoo"}, "did you mean duckduckgo"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        RetrievalSettings(**{"retriever": "exa"} | settings).check()
