"""Clients that are slow, many or gone: both servers give their connections up in time, and others are answered."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from urllib.parse import urlsplit

import pytest

from r3lite.core.episode import Document
from r3lite.core.http_server import Server, UnknownPath
from r3lite.core.listening import CONNECTION_LIMITS, ConnectionLimits
from r3lite.retrieval.server import RetrievalService

SHORT = ConnectionLimits(seconds=0.5, bytes_per_second=1 << 30, connections=3, poll_seconds=0.05)
QUERY = json.dumps({"queries": ["who?"]}).encode()
LARGE = "x" * (24 << 20)  # of a reply: more than the system keeps for a client that does not read


def post(path: str, body: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n".encode() + body


def connect(url: str, sent: bytes = b"") -> socket.socket:
    address = urlsplit(url)
    connection = socket.create_connection((address.hostname, address.port), timeout=20)
    connection.sendall(sent)
    return connection


def read_all(connection: socket.socket) -> bytes:
    """All that a server says until it closes the connection."""
    parts = []
    with connection, contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def until(condition, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(condition())


class Slow:
    """A service whose answers wait until they may go on; LARGE at /large."""

    largest = 1 << 20
    raw = ()
    token = None

    def __init__(self):
        self.one_at_a_time = threading.Lock()
        self.may_go_on = threading.Event()
        self.computed: list[str] = []

    def answer(self, path, request, peer):
        if path == "/large":
            return {"text": LARGE}
        if path.startswith("/wait/"):
            with peer.holding(self.one_at_a_time):
                self.computed.append(path)
                self.may_go_on.wait(20)
                return {}
        raise UnknownPath(path)


@pytest.fixture
def slow(running):
    """A server with short limits, its service and its address."""
    service = Slow()
    server = Server(service, host="127.0.0.1", port=0, limits=SHORT)
    yield server, service, running(server)
    service.may_go_on.set()


def retriever(limits: ConnectionLimits) -> Server:
    service = RetrievalService(lambda pairs: [[Document("1", "T", "It is.")] for _ in pairs], None, 5)
    return Server(service, host="127.0.0.1", port=0, limits=limits)


@pytest.mark.parametrize("beginning", [b"", b"POST /retrieve HTTP/1.1\r\nX: ", post("/retrieve", b"{", length=9999)])
def test_a_byte_at_a_time_does_not_hold_a_thread(running, beginning):
    """Each byte began the time anew: 150 such clients held 150 threads for as long as they liked."""
    server = retriever(SHORT)
    start = time.monotonic()
    with connect(running(server), beginning) as connection, pytest.raises(ConnectionError):
        while time.monotonic() < start + 10:
            connection.sendall(b"x")
            time.sleep(0.05)
    assert until(lambda: not server._open_connections, 1) and time.monotonic() - start < 5


def test_a_large_request_has_as_much_longer_as_its_link_needs(running):
    limits = ConnectionLimits(seconds=0.3, bytes_per_second=50)
    connection = connect(running(retriever(limits)), post("/retrieve", b"", length=len(QUERY) + 300))
    for _ in range(6):
        connection.sendall(b" " * 50)
        time.sleep(0.2)
    connection.sendall(QUERY)
    assert read_all(connection).startswith(b"HTTP/1.0 200 ")


def test_a_client_that_does_not_read_its_reply_is_let_go(slow, running):
    server, _, url = slow
    with connect(url, post("/large", b"{}")):
        assert until(lambda: server._open_connections) and until(lambda: not server._open_connections)
    patient = Server(Slow(), host="127.0.0.1", port=0)
    assert len(read_all(connect(running(patient), post("/large", b"{}")))) > len(LARGE)


@pytest.mark.parametrize(
    "head", ["1.0\r\n", "1.1\r\nHost: localhost\r\nConnection: close\r\n", "1.1\r\nHost: localhost\r\n"]
)
def test_the_connection_ends_with_the_reply(running, head):
    """It was kept open for a minute, whatever the client had asked for."""
    start = time.monotonic()
    reply = read_all(connect(running(retriever(CONNECTION_LIMITS)), f"GET /health HTTP/{head}\r\n".encode()))
    assert reply.endswith(b'{"status": "ok"}') and time.monotonic() - start < 5


def test_connections_beyond_the_limit_are_refused_and_the_next_ones_answered(running):
    server = retriever(ConnectionLimits(connections=3))
    url = running(server)
    silent = [connect(url) for _ in range(3)]
    assert until(lambda: len(server._open_connections) == 3)
    for _ in range(3):
        head, _, body = read_all(connect(url, post("/retrieve", QUERY))).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.0 503 ") and json.loads(body)["error"].startswith("the server has too many")
    for connection in silent:
        connection.close()
    assert until(lambda: not server._open_connections)
    assert read_all(connect(url, post("/retrieve", QUERY))).startswith(b"HTTP/1.0 200 ")


def test_what_nobody_waits_for_is_not_computed(slow):
    """Each request of clients that had left was computed to its end, one after another."""
    server, service, url = slow
    first = connect(url, post("/wait/first", b"{}"))
    assert until(lambda: service.computed)
    leaving = [connect(url, post("/wait/left", b"{}")) for _ in range(2)]
    assert until(lambda: len(server._open_connections) == 3)
    for connection in leaving:
        connection.close()
    assert until(lambda: len(server._open_connections) == 1, 5)  # before the first is answered
    last = connect(url, post("/wait/last", b"{}"))
    service.may_go_on.set()
    assert all(read_all(connection).startswith(b"HTTP/1.0 200 ") for connection in (first, last))
    assert service.computed == ["/wait/first", "/wait/last"]


def test_a_body_that_breaks_off_is_no_request(slow):
    """It was answered, if what had come was JSON."""
    _, service, url = slow
    connection = connect(url, post("/wait/cut", b"{}", length=3))
    connection.shutdown(socket.SHUT_WR)
    assert read_all(connection) == b"" and service.computed == []


# The server of answers


@pytest.fixture
def limited(serving, monkeypatch):
    """Starts the server of answers with short limits."""
    from r3lite.serving.http import Connection

    monkeypatch.setattr(Connection, "limits", SHORT)
    return serving


def test_the_server_of_answers_refuses_connections_beyond_the_limit(limited):
    url = limited().url
    silent = [connect(url) for _ in range(3)]
    head, _, body = read_all(connect(url)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ") and json.loads(body)["error"]["code"] == "overloaded"
    for connection in silent:
        connection.close()
    get = b"GET /api/health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    assert until(lambda: read_all(connect(url, get)).startswith(b"HTTP/1.1 200 "))


def test_the_server_of_answers_lets_a_client_go_that_does_not_read(limited):
    """It waited for such a client without end, and its answer held its place."""
    uvicorn = pytest.importorskip("uvicorn", reason="needs the extra serve")
    from r3lite.serving.http import Connection

    app_returned = threading.Event()

    async def large(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(64):
            await send({"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True})
        app_returned.set()

    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(large, http=Connection, lifespan="off", log_level="critical", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
    thread.start()
    host, port = listening.getsockname()
    with connect(f"http://{host}:{port}", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        assert app_returned.wait(10) and until(lambda: not server.server_state.connections)
    server.should_exit = True
    thread.join()
