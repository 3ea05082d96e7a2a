"""Retrieval over HTTP: our server and our client together, other servers, and every way in which one can fail."""

import json
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer

import pytest

from r3lite import retrieve as command
from r3lite.core.config import UsageError
from r3lite.core.episode import Document, Failure, Question
from r3lite.core.errors import R3LiteError
from r3lite.retrieval import remote, server
from r3lite.retrieval.remote import Remote, RemoteReranker
from r3lite.retrieval.retriever import build_retriever
from r3lite.retrieval.setup import Setup
from r3lite.settings import RetrievalSettings
from tests.errors import raises
from tests.scripted_server import Scripted

PASSAGES = [Document(str(i), f"Town {i}", f"Town {i} lies by the river {'abc'[i % 3] * 4}.") for i in range(40)]
QUESTION = Question("q", "Where is Town 7?", ("x",))


@pytest.fixture
def slept(monkeypatch):
    """The pauses before other tries, which are not made."""
    pauses = []
    monkeypatch.setattr(remote, "sleep", pauses.append)
    return pauses


@pytest.fixture(scope="module")
def local():
    """A retriever of the passages, by hashing."""
    question = Question("all", "x", ("x",), tuple(PASSAGES))
    settings = RetrievalSettings(encoder="hashing", top_k=5)
    return build_retriever(Setup(settings, [question]))


@pytest.fixture
def served(local, running):
    rerank = lambda pairs: [float(len(document)) for _, document in pairs]  # noqa: E731
    return running(server.Server(server.RetrievalService(local, rerank, 5), "127.0.0.1", 0))


def ask(url: str, body, path: str = "/retrieve") -> tuple[int, dict]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data), timeout=10) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_its_end_waits_for_the_answer_under_way_and_lets_no_other_begin(local):
    """A thread that computed while Python ended aborted the process, and its client was told nothing."""
    search_started = threading.Event()
    goes_on = threading.Event()

    def slow(pairs):
        search_started.set()
        assert goes_on.wait(10)
        return local(pairs)

    retrieval_server = server.Server(server.RetrievalService(slow, None, 5), "127.0.0.1", 0)
    threading.Thread(target=retrieval_server.serve_forever, daemon=True).start()
    with ThreadPoolExecutor(2) as pool:
        under_way = pool.submit(ask, f"http://127.0.0.1:{retrieval_server.server_port}", {"queries": ["Town 3"]})
        assert search_started.wait(10)
        retrieval_server.shutdown()
        closing = pool.submit(retrieval_server.server_close)
        assert not closing.done()
        goes_on.set()
        closing.result(10)
        assert under_way.result(10)[0] == 200
    assert retrieval_server.service.one_at_a_time.locked()


def over_http(url: str, top_k: int = 5):
    settings = RetrievalSettings(retriever=f"{url}/retrieve", top_k=top_k)
    settings.check()
    return build_retriever(Setup(settings, [QUESTION]))


def test_over_http_is_what_it_is_here(local, served):
    pairs = [(QUESTION, f"river of Town {i}") for i in (3, 9, 3)]
    local_rows = local(pairs)
    remote_rows = over_http(served)(pairs)
    assert remote_rows == local_rows and len(remote_rows[0]) == 5
    scores = [[(d.score, d.source) for d in row] for row in remote_rows]
    assert scores == [[(d.score, d.source) for d in row] for row in local_rows]
    assert over_http(served, top_k=2)(pairs) == [row[:2] for row in local_rows]


def test_many_queries_go_in_several_requests(local, running, monkeypatch):
    monkeypatch.setattr(remote, "BATCH", 4)
    requests = []
    counted = lambda pairs: requests.append(len(pairs)) or local(pairs)  # noqa: E731
    retrieve = over_http(running(server.Server(server.RetrievalService(counted, None, 5), "127.0.0.1", 0)))
    requests.clear()  # of the query that tries the address
    pairs = [(QUESTION, f"Town {i}") for i in range(11)]
    assert retrieve(pairs) == local(pairs)
    assert requests == [4, 4, 3]


def test_several_machines_at_once_get_what_each_gets_alone(local, served):
    retrieve = over_http(served)
    queries = [(QUESTION, f"Town {i}") for i in range(16)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda pair: retrieve([pair]), queries)) == [local([pair]) for pair in queries]


def test_the_form_of_search_r1(served):
    """Its client reads result[i][j]["document"]["contents"], whose first line is the title."""
    status, reply = ask(served, {"queries": ["Town 7", "Town 8"], "topk": 3, "return_scores": True})
    assert status == 200 and [len(row) for row in reply["result"]] == [3, 3]
    first = reply["result"][0][0]
    assert first["document"]["contents"].split("\n") == ['"Town 7"', first["document"]["text"]] and first["score"] > 0
    status, reply = ask(served, {"queries": ["Town 7"]})  # without scores there are bare documents, top_k of them
    assert reply["result"][0][0]["contents"] == first["document"]["contents"] and len(reply["result"][0]) == 5


def test_a_request_is_read_whole_before_anything_is_searched(running):
    searches = []
    service = running(server.Server(server.RetrievalService(searches.append, None, 5), "127.0.0.1", 0))
    status, reply = ask(service, {"queries": ["Town 7"], "return_scores": "yes"})
    assert status == 400 and "return_scores" in reply["error"]
    assert searches == []


def test_reranking_as_a_service(served, local, running):
    documents = ["aa", "aaaa", "a"]
    status, reply = ask(served, {"query": "q", "documents": documents}, "/rerank")
    assert status == 200 and reply["result"] == [{"index": i, "score": float(len(documents[i]))} for i in (1, 0, 2)]
    assert (
        ask(
            running(server.Server(server.RetrievalService(local, None, 5), "127.0.0.1", 0)),
            {"query": "q", "documents": []},
            "/rerank",
        )[0]
        == 404
    )
    status, reply = ask(served, {"query": "q", "documents": ["a"] * (server.MAX_PASSAGES + 1)}, "/rerank")
    assert status == 400 and reply == {"error": "at most 1000 documents"}
    assert len(ask(served, {"query": "q", "documents": ["a"] * server.MAX_PASSAGES}, "/rerank")[1]["result"]) == 1000


def test_passages_are_reranked_by_another_machine(served):
    pairs = [(f"q{i % 3}", "a" * (i % 50)) for i in range(200)]
    assert RemoteReranker(f"{served}/rerank").scores(pairs) == [float(i % 50) for i in range(200)]
    question = Question("all", "x", ("x",), (*PASSAGES, Document("long", "", "Town 7 " * 50)))
    settings = RetrievalSettings(encoder="hashing", top_k=2, rerank=f"{served}/rerank")
    settings.check()
    (documents,) = build_retriever(Setup(settings, [question]))([(QUESTION, "Where is Town 7?")])
    assert (documents[0].id, documents[0].score, len(documents)) == ("long", 350.0, 2)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b'{"result": []}', b'{"result": [{"index": 1, "score": 1}]}', b'{"result": [{"index": 0}]}',
     b'{"result": [{"index": 0, "score": NaN}]}'],
)  # fmt: skip
def test_what_is_no_reply_of_a_reranker_is_told(running, slept, body):
    url = running(Scripted((200, body, 0)))
    with pytest.raises(R3LiteError, match="did not reply like a reranker"):
        RemoteReranker(f"{url}/rerank")


def test_a_reranker_that_fails_later_fails_its_queries_and_a_wrong_one_shows_at_once(running):
    url = running(Scripted((200, b'{"result": [{"index": 0, "score": 1}]}', 0), (404, b"gone", 0)))
    settings = RetrievalSettings(encoder="hashing", rerank=f"{url}/rerank")
    question = Question("all", "x", ("x",), tuple(PASSAGES))
    (failure,) = build_retriever(Setup(settings, [question]))([(QUESTION, "Where is Town 7?")])
    assert isinstance(failure, Failure) and "refuses: status 404: gone" in failure.reason
    with pytest.raises(R3LiteError, match="refuses: status 404") as error:
        build_retriever(Setup(settings, [question]))
    assert "--rerank here ends in /rerank" in error.value.remedy
    with pytest.raises(UsageError, match="the address of --rerank is not an http or https address"):
        RetrievalSettings(rerank="ftp://host/rerank").check()


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "not JSON"),
        (b"\xff", 400, "UTF-8"),
        (b"[]", 400, "not a JSON object"),
        ({}, 400, "queries is missing"),
        ({"queries": "Town"}, 400, "queries is 'Town', not a list of texts"),
        ({"queries": ["a"], "topk": 6}, 400, "at most 4096 queries and 5 documents"),
        ({"queries": ["a"] * 4097}, 400, "at most 4096 queries"),
        ({"queries": ["a"], "topk": 0}, 400, "topk"),
        (b"x" * (server.RetrievalService.largest + 1), 413, "at most 4 MiB"),
    ],
)
def test_a_bad_request_is_refused_with_the_reason(served, body, status, message):
    try:
        reply_status, reply = ask(served, body)
    except (ConnectionError, urllib.error.URLError):  # the server has answered and hung up before all was sent
        assert status == 413
        return
    assert reply_status == status and message in reply["error"]


def test_other_paths_are_not_found_and_the_server_says_that_it_is_there(served):
    assert ask(served, {}, "/other")[0] == 404
    with urllib.request.urlopen(f"{served}/health", timeout=10) as reply:
        assert json.load(reply) == {"status": "ok"}


def test_a_failure_there_is_a_failure_here(running, capsys, monkeypatch):
    monkeypatch.setattr(remote, "PAUSE", 0.0)

    def retrieve(pairs):
        return [Failure("the disk is gone") if query == "bad" else [PASSAGES[0]] for _, query in pairs]

    results = over_http(running(server.Server(server.RetrievalService(retrieve, None, 5), "127.0.0.1", 0)))(
        [(QUESTION, "bad"), (QUESTION, "good")]
    )
    assert isinstance(results[0], Failure) and "503" in results[0].reason and "the disk is gone" in results[0].reason
    assert results[1] == [PASSAGES[0]]


def says(*documents) -> dict:
    return {"result": [list(documents)]}


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"document": {"id": 7, "contents": '"Rome"\nIn Italy.'}, "score": 0.5}, ("7", "Rome", "In Italy.", 0.5)),
        ({"document": {"id": "7", "contents": "One line"}, "score": 1}, ("7", "", "One line", 1.0)),
        ({"document": {"id": "7", "title": "T", "contents": "One line"}, "score": 1}, ("7", "T", "One line", 1.0)),
        ({"id": "7", "title": "T", "text": "B"}, ("7", "T", "B", None)),
        # Search-R1's servers of web search (google_search_server.py, serp_search_server.py) name no id.
        ({"document": {"contents": '"Rome"\nIn Italy.'}}, ("6138698964eb6546", "Rome", "In Italy.", None)),
    ],
)  # fmt: skip
def test_documents_of_other_servers(running, entry, expected):
    fake = Scripted((200, says(entry), 0))
    ((document,),) = Remote(running(fake)).search(["q"], 3)
    assert (document.id, document.title, document.text, document.score) == expected
    assert fake.json_bodies == [{"queries": ["q"], "topk": 3, "return_scores": True}]


def test_without_ids_the_same_text_is_the_same_document_and_another_is_not(running):
    rome, oslo = ({"document": {"contents": f'"{name}"\nA town.'}} for name in ("Rome", "Oslo"))
    fake = Scripted((200, says(rome, oslo), 0), (200, says(rome), 0))
    remote = Remote(running(fake))
    (first,), (second,) = remote.search(["q"], 3), remote.search(["r"], 3)
    assert second[0] == first[0] and len({document.id for document in first}) == 2


def test_no_more_documents_than_were_asked_for(running):
    fake = Scripted((200, says(*({"id": str(i), "text": "t"} for i in range(9))), 0))
    assert [d.id for d in Remote(running(fake)).search(["q"], 2)[0]] == ["0", "1"]


@pytest.mark.parametrize(
    "body",
    [b"<html>", [], {}, {"result": 5}, {"result": []}, {"result": [[], []]}, {"result": [5]}, {"result": [["text"]]},
     says({"document": 5}), says({"document": {"id": "1"}}), says({"document": {"id": [], "contents": "x"}}),
     says({"id": "1", "contents": 7}), b'{"result": [[{"id": "1", "text": "x", "score": NaN}]]}', b"[" * 100_000],
)  # fmt: skip
def test_what_is_no_reply_of_a_retriever_is_told(running, slept, body):
    fake = Scripted((200, body, 0))
    with pytest.raises(R3LiteError, match="did not reply like a retriever"):
        Remote(running(fake)).search(["q"], 3)
    assert len(fake.json_bodies) == 1  # it would say the same again


def test_an_empty_list_is_an_answer(running):
    assert Remote(running(Scripted((200, says(), 0)))).search(["q"], 3) == [[]]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_may_pass_is_tried_again(running, slept, status):
    fake = Scripted((status, b"later", 0), (status, b"later", 0), (200, says({"id": "1", "text": "x"}), 0))
    assert len(Remote(running(fake)).search(["q"], 3)[0]) == 1
    assert slept == [0.5, 1.0]


def test_a_pause_that_the_server_asks_for_is_made(running, slept):
    later = [(429, b"", 0, {"retry-after": retry_after}) for retry_after in ("7", "soon")]
    fake = Scripted(*later, (200, says(), 0))
    assert Remote(running(fake)).search(["q"], 3) == [[]]
    assert slept == [7.0, 1.0]


def test_at_last_it_gives_up(running, slept):
    fake = Scripted((503, b"down for repairs", 0))
    with pytest.raises(R3LiteError, match="status 503: down for repairs"):
        Remote(running(fake)).search(["q"], 3)
    assert len(fake.json_bodies) == remote.TRIES


def test_a_server_that_has_answered_may_start_again(running, slept):
    """A restart takes longer than the pauses of three tries: a round's queries failed in between."""
    fake = Scripted((200, says(), 0), *[(503, b"starting", 0)] * 7, (200, says(), 0))
    retriever = Remote(running(fake))
    assert retriever.search(["q"], 3) == retriever.search(["q"], 3) == [[]]
    assert slept == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0]


def test_a_refusal_is_final(running):
    fake = Scripted((404, b"not here", 0))
    with pytest.raises(R3LiteError, match="refuses: status 404: not here"):
        Remote(running(fake)).search(["q"], 3)
    assert len(fake.json_bodies) == 1


def test_a_server_that_is_slow_or_not_there_or_sends_without_end(running, slept, monkeypatch):
    monkeypatch.setattr(remote, "TIMEOUT", 0.2)
    with pytest.raises(R3LiteError, match=r"does not answer: .*[Tt]ime"):
        Remote(running(Scripted((200, says(), 1.0)))).search(["q"], 3)
    with pytest.raises(R3LiteError, match="does not answer: ConnectError"):
        Remote("http://127.0.0.1:9/retrieve").search(["q"], 3)
    monkeypatch.setattr(remote, "LARGEST", 1000)
    with pytest.raises(R3LiteError, match="sends more than"):
        Remote(running(Scripted((200, b"x" * 10_000, 0)))).search(["q"], 3)


def test_a_wrong_address_shows_before_the_run(monkeypatch):
    monkeypatch.setattr(remote, "PAUSE", 0.0)
    with pytest.raises(R3LiteError, match="Check that the server runs"):
        over_http("http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"retriever": "semantik"}, "did you mean semantic"),
        ({"retriever": "http://user:secret@host/retrieve"}, "contains a user or password"),
        ({"retriever": "ftp://host/x"}, "is not an http or https address"),
    ],
)
def test_settings_that_contradict_each_other(settings, message):
    with pytest.raises(UsageError, match=message) as error:
        RetrievalSettings(**settings).check()
    assert "secret" not in str(error.value)


def test_an_address_that_is_taken_is_told(local, running):
    first_server = server.Server(server.RetrievalService(local, None, 5), "127.0.0.1", 0)
    running(first_server)
    with raises(R3LiteError, "cannot-listen"):
        server.Server(server.RetrievalService(local, None, 5), "127.0.0.1", first_server.server_port)


def test_the_command_serves_an_index_until_it_is_interrupted(tmp_path, capsys, monkeypatch):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(d.to_json()) + "\n" for d in PASSAGES), encoding="utf-8")

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", interrupted)
    flags = ["--corpus", str(corpus), "--encoder", "hashing", "--serve", "--port", "0"]
    assert command.main(flags) == 130
    assert "/retrieve, 5 documents per query" in capsys.readouterr().out
    assert command.main([*flags, "--query", "x"]) == 2 and command.main([*flags, "--retriever", "none"]) == 2
