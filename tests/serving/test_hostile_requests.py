"""Requests that no client would send, to both servers: each is refused or answered, and so are others after it."""

import http.client
import json
import socket
import struct
import threading
import time
from urllib.parse import urlsplit

import pytest

from r3lite.core.episode import Document
from r3lite.core.listening import CONNECTION_LIMITS, ConnectionLimits
from r3lite.retrieval import server as retrieval_server
from r3lite.serving import http as serving_http
from r3lite.serving.routing import route
from tests.serving.test_app import free_again, generate, send

ASK = {"query": "x"}


def request(path="/generate", body=ASK, head=b"", length=None, method="POST", kind=b"application/json") -> bytes:
    """The bytes of a request; `head`: more header lines."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    first = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n".encode()
    size = b"Content-Length: %d\r\n" % (len(data) if length is None else length)
    return first + b"Content-Type: " + kind + b"\r\n" + size + head + b"\r\n" + data


def reply_to(running, sent: bytes, wait: float = 20.0) -> bytes:
    """What a server says to these bytes; nothing if it closes the connection without a word."""
    address = urlsplit(running.url)
    with socket.create_connection((address.hostname, address.port), timeout=wait) as connection:
        try:
            connection.sendall(sent)
            return connection.recv(4000)
        except ConnectionError:  # closed before all was sent
            return b""


def header_lines(count: int) -> bytes:
    return b"".join(b"X-%d: 1\r\n" % i for i in range(count))


# What is sent, and the statuses that may come; None: the connection is closed.
REQUESTS = {
    "10,000 headers": (request(head=header_lines(10_000)), {200, 400, 431, None}),
    "a header of 1 MiB": (request(head=b"X: " + b"x" * (1 << 20) + b"\r\n"), {400, 431, None}),
    "a path of 1 MiB": (request("/" + "x" * (1 << 20)), {400, 404, 414, None}),
    "a token of 60 KB": (request(head=b"Authorization: Bearer " + b"x" * 60_000 + b"\r\n"), {200, 400, 431}),
    "no HTTP": (b"\x16\x03\x01\x00\xa5\x01\x00\x00" * 20 + b"\r\n\r\n", {400, None}),
    "NUL in a header": (request(head=b"X: \x00\r\n"), {400}),
    "two hosts": (request(head=b"Host: evil.example\r\n"), {400}),
    "two lengths": (request(head=b"Content-Length: 2\r\n"), {400}),
    "a length and chunks": (request(head=b"Transfer-Encoding: chunked\r\n"), {400, 408}),
    "a length below zero": (request(length=-1), {400}),
    "a length of 5,000 digits": (request(head=b"", length=10**4000), {400, 413}),
    "chunks of no length": (
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", {400},
    ),
    "a path out of the server": (request("/../../../../etc/passwd", method="GET"), {404}),
    "an escaped path": (request("/%2e%2e/%2e%2e/etc/passwd", method="GET"), {404}),
    "a path of a file of ours": (request("/page.html", method="GET"), {404}),
    "a path with NUL": (request("/%00", method="GET"), {404}),
    "a model that is a path": (request("/v1/models/..%2f..%2f..%2fetc%2fpasswd", method="GET"), {404}),
    "a whole address as path": (request("http://evil.example/generate"), {400, 404}),
    "another method": (request(method="DELETE"), {405}),
    "an unknown method": (request(method="BREW"), {405}),
    "a trace": (request(method="TRACE"), {405}),
    "an upgrade": (request(head=b"Upgrade: websocket\r\nConnection: upgrade\r\n", method="GET", path="/"), {200, 400}),
    "an adapter that is a path": (request(body={"query": "x", "adapter": "../../etc"}), {400}),
    "an adapter that is a drive": (request(body={"query": "x", "adapter": "C:\\Windows"}), {400}),
    "an adapter with NUL": (request(body={"query": "x", "adapter": "rl\x00"}), {400}),
    "an adapter in capitals": (request(body={"query": "x", "adapter": "RL"}), {400}),
    "a conversation that is a path": (request(body={"query": "x", "conversation": "../x"}), {400}),
    "a conversation with a line end": (request(body={"query": "x", "conversation": "x\n"}), {400}),
    "a mode that is a path": (request(body={"query": "x", "mode": "../chat"}), {400}),
    "a model of the other API that is a path": (
        request("/v1/chat/completions", {"model": "../rl", "messages": [{"role": "user", "content": "x"}]}), {404},
    ),
    "bytes that are not UTF-8": (request(body=b'{"query": "\xff"}'), {400}),
    "UTF-16": (request(body=json.dumps(ASK).encode("utf-16")), {200, 400}),
    "half a surrogate pair": (request(body=b'{"query": "\\ud800"}'), {400}),
    "a key twice": (request(body=b'{"query": "x", "query": "y"}'), {200, 400}),
    "NaN": (request(body=b'{"query": NaN}'), {400}),
    "nesting": (request(body=b'{"query": ' + b"[" * 100_000), {400}),
    "digits": (request(body=b'{"query": ' + b"9" * 100_000 + b"}"), {400}),
    "a body too large": (request(body=b'{"query": "' + b"x" * (1 << 20) + b'"}'), {413, None}),
    "no body": (request(body=b""), {400}),
    "a form": (request(body=b'{"query": "x"}', kind=b"application/x-www-form-urlencoded"), {400}),
    "a text": (request(body=b'{"query": "x"}', kind=b"text/plain"), {400}),
    "a text that names JSON": (request(body=b'{"query": "x"}', kind=b"text/plain; application/json"), {400}),
    "a multipart form": (request(body=b'{"query": "x"}', kind=b"multipart/form-data; boundary=json"), {400}),
    "another site's name": (request().replace(b"Host: localhost", b"Host: localhost.evil.example"), {400}),
    "an address as name": (request().replace(b"Host: localhost", b"Host: 169.254.169.254"), {400}),
    "no name": (request().replace(b"Host: localhost\r\n", b""), {400}),
}  # fmt: skip


def status_of(reply: bytes) -> int | None:
    return int(reply.split()[1]) if reply.startswith(b"HTTP/1.1 ") else None


def test_each_request_is_answered_as_it_should_and_the_next_one_too(serving, monkeypatch):
    monkeypatch.setattr(serving_http.Connection, "limits", ConnectionLimits(seconds=0.5))
    running = serving()
    wrong = {}
    for name, (sent, statuses) in REQUESTS.items():
        start = time.monotonic()
        reply = reply_to(running, sent)
        if status_of(reply) not in statuses or b"Traceback" in reply or time.monotonic() - start > 20:
            wrong[name] = reply[:300]
    assert wrong == {}
    assert generate(running, query="still here")[1]["final_answer"] == "still here" and free_again(running)


def test_a_message_does_not_keep_others_from_an_answer_by_its_words(serving):
    """One of 250 KB held the event loop for half a minute: how many ... was looked for up to a digit, at each place."""
    running = serving()
    start = time.process_time()
    for unit in ("how many ", "how much\t", "1 ", "? ", "please ", "hi\n", "hello, ", "if all "):
        status, reply = generate(running, query=(unit * 60_000)[:200_000])
        assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")  # behind the choice of a mode
    assert time.process_time() - start < 5
    assert route("how many apples are 3 and 4", ("chat", "reasoning")) == "reasoning"


def silent(running, head: bytes) -> socket.socket:
    address = urlsplit(running.url)
    connection = socket.create_connection((address.hostname, address.port), timeout=20)
    connection.sendall(head)
    return connection


def test_clients_that_never_finish_a_request_are_let_go_and_others_answered(serving, monkeypatch):
    """uvicorn waits for the rest of a head without end: some hundred such connections used all descriptors up."""
    monkeypatch.setattr(serving_http.Connection, "limits", ConnectionLimits(seconds=0.5))
    running = serving()
    keep_alive = request().replace(b"Connection: close\r\n", b"")
    beginnings = [b"", b"POST", b"POST /generate HTTP/1.1\r\nHost: localhost\r\nX: ", request(body=b"{", length=100)]
    waiting = [silent(running, head) for head in beginnings for _ in range(40)]
    second = silent(running, keep_alive)  # whose next request does not come
    assert second.recv(4000).startswith(b"HTTP/1.1 200")
    second.sendall(b"GET /")
    start = time.monotonic()
    for _ in range(3):
        assert generate(running, query="x")[0] == 200
    for connection in [*waiting, second]:
        with connection:
            while connection.recv(4000):  # until it is closed; the last ones are told why
                pass
    assert time.monotonic() - start < 20 and free_again(running)


def test_a_drop_at_a_time_does_not_put_the_end_off(serving, monkeypatch):
    monkeypatch.setattr(serving_http.Connection, "limits", ConnectionLimits(seconds=0.6))
    running = serving()
    with silent(running, b"GET / HTTP/1.1\r\n") as connection:
        start = time.monotonic()
        with pytest.raises(ConnectionError):
            for _ in range(100):
                connection.sendall(b"X: 1\r\n")
                time.sleep(0.1)
        assert time.monotonic() - start < 9
    slow = serving(slow=0.05)  # an answer may take longer than a head
    assert generate(slow, query="word " * 30)[0] == 200


def test_connections_that_break_off_leave_nothing_behind(serving):
    running = serving(slow=0.01)
    body = json.dumps({"query": "word " * 100, "stream": True}).encode()
    for cut in (30, 120, len(request(body=body)) - 3, len(request(body=body))):
        for reset in (False, True):
            connection = silent(running, request(body=body)[:cut])
            time.sleep(0.03)
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
    assert free_again(running) and generate(running, query="x")[0] == 200


def test_what_one_page_may_ask_another_sites_may_not(serving):
    """A browser asks first (OPTIONS) for JSON, and gets no leave; what needs no leave is refused by its type."""
    running = serving()
    asks = {"Origin": "https://evil.example", "Access_Control_Request_Method": "POST"}
    for path in ("/generate", "/v1/chat/completions"):
        status, headers, _ = send(running, "OPTIONS", path, **asks, Access_Control_Request_Headers="content-type")
        assert status == 405 and not [name for name in headers if name.lower().startswith("access-control")]
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        assert send(running, "POST", "/generate", '{"query": "x"}', Origin="null", Content_Type=kind)[0] == 400
    assert not running.answering.asks


# The server of a retriever


@pytest.fixture
def retriever():
    def start(host="127.0.0.1", limits=CONNECTION_LIMITS):
        def retrieve(pairs):
            return [[Document("1", "T", "It is.")] for _ in pairs]

        service = retrieval_server.RetrievalService(retrieve, None, 5)
        server = retrieval_server.Server(service, host=host, port=0, limits=limits)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        started.append(server)
        server.url = f"http://127.0.0.1:{server.server_address[1]}"
        return server

    started = []
    yield start
    for server in started:
        server.shutdown()
        server.server_close()


QUERY = {"queries": ["who?"]}
OF_RETRIEVER = {
    "sound": (request("/retrieve", QUERY), 200),
    "10,000 headers": (request("/retrieve", QUERY, head=header_lines(10_000)), 431),
    "a long header": (request("/retrieve", QUERY, head=b"X: " + b"x" * 70_000 + b"\r\n"), 431),
    "a long path": (request("/" + "x" * 70_000, QUERY), 414),
    "a path out of the server": (request("/../../etc/passwd", QUERY), 404),
    "an escaped path": (request("/%2e%2e/retrieve", QUERY), 404),
    "another method": (request("/retrieve", QUERY, method="DELETE"), 501),
    "no length": (request("/retrieve", QUERY).replace(b"Content-Length", b"X"), 413),
    "a length below zero": (request("/retrieve", QUERY, length=-1), 413),
    "a length of 5,000 digits": (request("/retrieve", QUERY, length=10**4000), 413),
    "too much": (request("/retrieve", QUERY, length=retrieval_server.RetrievalService.largest + 1), 413),
    "two lengths": (request("/retrieve", QUERY, head=b"Content-Length: 2\r\n"), 200),
    "chunks": (request("/retrieve", QUERY, b"Transfer-Encoding: chunked\r\n").replace(b"Content-Length", b"X"), 413),
    "bytes that are not UTF-8": (request("/retrieve", b'{"queries": ["\xff"]}'), 400),
    "half a surrogate pair": (request("/retrieve", b'{"queries": ["\\ud800"]}'), 400),
    "nesting": (request("/retrieve", b'{"queries": ' + b"[" * 100_000 + b"}"), 400),
    "digits": (request("/retrieve", b'{"topk": ' + b"9" * 100_000 + b"}"), 400),
    "NaN": (request("/retrieve", b'{"queries": ["x"], "topk": NaN}'), 400),
    "a number of documents below one": (request("/retrieve", QUERY | {"topk": 0}), 400),
    "too many queries": (request("/retrieve", {"queries": ["x"] * 5000}), 400),
    "another site's name": (request("/retrieve", QUERY).replace(b"localhost", b"evil.example"), 403),
    "a name that begins as ours": (request("/retrieve", QUERY).replace(b"localhost", b"localhost.evil.example:1"), 403),
    "a page of another site": (request("/retrieve", QUERY, head=b"Origin: https://evil.example\r\n"), 403),
    "a page without a site": (request("/retrieve", QUERY, head=b"Origin: null\r\n", kind=b"text/plain"), 403),
    "the health, by another name": (request("/health", b"", method="GET").replace(b"localhost", b"evil.example"), 403),
}  # fmt: skip


def test_each_request_to_a_retriever_is_answered_as_it_should(retriever, capfd):
    running = retriever()
    wrong = {}
    for name, (sent, status) in OF_RETRIEVER.items():
        reply = reply_to(running, sent)
        if not reply.startswith(b"HTTP/1.0 %d " % status):
            wrong[name] = reply[:300]
    assert wrong == {}
    for host in (b"127.0.0.1:80", b"[::1]:80", b"localhost:8000"):
        assert b" 200 " in reply_to(running, request("/retrieve", QUERY).replace(b"localhost", host))[:20]
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"POST /retrieve HTTP/1\r\n\r\n", 400),
        (b"POST /retrieve http/1.1\r\n\r\n", 400),
        (b" /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /health HTTP/3.0\r\n\r\n", 505),
        (b"x" * 3000 + b"\r\n\r\n", 400),
        (b"BREW / HTTP/1.1\r\n\r\n", 501),
    ],
)
def test_what_is_no_request_is_refused_in_json_too(retriever, sent, status):
    """It was a page of HTML, and without a status if the first line could not be read."""
    with silent(retriever(), sent) as connection:
        reply = b"".join(iter(lambda: connection.recv(4000), b""))  # until it is closed
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 %d " % status) and b"content-type: application/json" in head
    assert 0 < len(json.loads(body)["error"]) <= 200


def test_a_retriever_that_others_can_reach_has_any_name_and_answers_no_page(retriever):
    running = retriever(host="0.0.0.0")
    assert b" 200 " in reply_to(running, request("/retrieve", QUERY).replace(b"localhost", b"gpu-box:8000"))[:20]
    assert b" 403 " in reply_to(running, request("/retrieve", QUERY, head=b"Origin: http://gpu-box:8000\r\n"))[:20]


def test_clients_that_break_off_or_wait_neither_stop_a_retriever_nor_fill_its_log(retriever, capfd):
    running = retriever(limits=ConnectionLimits(seconds=0.5))
    full_request = request("/retrieve", QUERY)
    for cut in (10, len(full_request) - 5, len(full_request)):
        for _ in range(3):
            connection = silent(running, full_request[:cut])
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
    waiting = [silent(running, full_request[:cut]) for cut in (0, 10, len(full_request) - 5) for _ in range(30)]
    assert b" 200 " in reply_to(running, full_request)[:20]
    for connection in waiting:
        with connection:
            while connection.recv(4000):
                pass
    connection = http.client.HTTPConnection(urlsplit(running.url).netloc, timeout=5)
    connection.request("GET", "/health")
    assert json.loads(connection.getresponse().read()) == {"status": "ok"}
    connection.close()
    assert "Traceback" not in "".join(capfd.readouterr())
