"""Where servers listen: one meaning of loopback, tokens that a header can carry, and what shows before loading."""

import json
import socket
import threading
import urllib.error
import urllib.request

import pytest

from r3lite import retrieve, rollout_worker
from r3lite.assembly import rollout_service
from r3lite.core import listening
from r3lite.core.errors import R3LiteError
from r3lite.core.http_server import Server
from r3lite.retrieval import server as retrieval_server
from r3lite.retrieval.remote import Remote
from r3lite.settings import ServerSettings
from tests.errors import raises, shows

OURS = ["127.0.0.1", "127.0.0.2", "127.255.0.9", "::1", "[::1]", "::ffff:127.0.0.1", "localhost", "LOCALHOST"]
OTHERS = ["0.0.0.0", "::", "192.168.1.7", "::2", "128.0.0.1", "example.org", "localhost.example.org", "", "[::1"]


def can_listen(host: str) -> bool:
    try:
        listening.listen(host, 0).close()
    except R3LiteError:
        return False
    return True


@pytest.mark.parametrize("host", OURS + OTHERS)
def test_loopback_is_the_same_for_an_address_and_for_a_name_that_is_asked_for(host):
    assert listening.is_loopback(host) == ServerSettings(host=host).on_loopback == (host in OURS)


def test_the_host_of_a_header():
    hosts = {"a:80": "a", "a": "a", "[::1]:80": "[::1]", "[::1]": "[::1]", "127.0.0.2:1": "127.0.0.2"}
    assert {header: listening.host_of(header) for header in hosts} == hosts


def test_a_token_that_no_header_can_carry_is_refused_by_the_server_and_by_its_client(monkeypatch):
    """It was accepted, and then no request had it."""
    for token in ("\u0441\u0435\u043a\u0440\u0435\u0442" * 4, "\u00e9" * 20, "a secret\nof two lines"):
        monkeypatch.setenv(listening.TOKEN, token)
        for read in (lambda: listening.token_of("127.0.0.1"), lambda: listening.bearer(listening.TOKEN)):
            with raises(R3LiteError, "token-not-ascii", "R3LITE_TOKEN") as error:
                read()
            assert token not in str(error.value)
    monkeypatch.setenv(listening.TOKEN, "a secret of this test")
    assert listening.bearer(listening.TOKEN) == {"authorization": "Bearer a secret of this test"}
    monkeypatch.delenv(listening.TOKEN)
    assert listening.bearer(listening.TOKEN) == {} and listening.token_of("127.0.0.2") is None


def service(token=None):
    return retrieval_server.RetrievalService(lambda pairs: [[] for _ in pairs], None, 5, token)


def health(url: str, **headers) -> int:
    request = urllib.request.Request(f"{url}/health", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            assert json.load(reply) == {"status": "ok"}
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.fixture
def at():
    """Starts a server at an address; its URL."""
    started = []

    def start(host: str) -> str:
        listener = listening.listen(host, 0)
        server = Server(service(), host, 0, listener)
        started.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return listening.url_of(listener)

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


@pytest.mark.skipif(not can_listen("::1"), reason="this machine has no IPv6")
def test_a_server_listens_at_an_address_of_version_6(at):
    """The class of the standard library makes a socket of version 4, whatever the address."""
    url = at("::1")
    assert url.startswith("http://[::1]:") and health(url) == 200
    assert health(url, Host="example.org") == 403


@pytest.mark.skipif(not can_listen("127.0.0.2"), reason="this machine has no 127.0.0.2")  # as macOS
def test_a_server_at_any_loopback_address_answers_to_loopback_names_and_to_no_other(at):
    """At 127.0.0.2 it answered pages of other sites, and at 127.0.0.1 not to that address."""
    for host in ("127.0.0.1", "127.0.0.2"):
        url = at(host)
        assert health(url) == health(url, Host="127.0.0.2:80") == health(url, Host="LocalHost") == 200
        assert health(url, Host="example.org") == 403


def test_a_retriever_that_others_can_reach_needs_a_token_before_it_loads_anything(monkeypatch, capsys):
    monkeypatch.delenv(listening.TOKEN, raising=False)
    monkeypatch.setattr(retrieve, "read_setup", lambda *arguments: pytest.fail("it loads"))
    assert retrieve.main(["--corpus", __file__, "--serve", "--port", "0", "--host", "0.0.0.0"]) == 1
    assert shows(capsys.readouterr().err, "token-missing", "0.0.0.0", "R3LITE_TOKEN")


def status_of(url: str, body: bytes | None, authorization: str | None) -> int:
    headers = {} if authorization is None else {"Authorization": authorization}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=10) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code


def test_every_request_but_that_for_the_health_carries_the_whole_token(running):
    token = "a secret of this test"
    url = running(service(token))
    asks = {"/retrieve": b'{"queries": ["x"]}', "/version": None}
    for path, body in asks.items():
        for wrong in (None, "", "Bearer ", f"Bearer {token}x", f"Bearer {token[:-1]}", f"Basic {token}"):
            assert status_of(url + path, body, wrong) == 401, (path, wrong)
    statuses = {path: status_of(url + path, body, f"Bearer {token}") for path, body in asks.items()}
    assert statuses == {"/retrieve": 200, "/version": 404}
    assert status_of(f"{url}/health", None, None) == 200


def test_a_short_token_is_refused(monkeypatch):
    monkeypatch.setenv(listening.TOKEN, "x" * (listening.SHORTEST_TOKEN - 1))
    with raises(R3LiteError, "token-short"):
        listening.token_of("127.0.0.1")
    monkeypatch.setenv(listening.TOKEN, "x" * listening.SHORTEST_TOKEN)
    assert listening.token_of("127.0.0.1") == "x" * listening.SHORTEST_TOKEN


def test_its_clients_send_the_token_of_the_retriever_and_not_that_of_our_own_server(monkeypatch, running):
    url = running(service("a secret of this test")) + "/retrieve"
    monkeypatch.delenv(listening.RETRIEVER_TOKEN, raising=False)
    monkeypatch.setenv(listening.TOKEN, "a secret of this test")
    with pytest.raises(R3LiteError, match=r"(?s)status 401: .* and R3LITE_RETRIEVER_TOKEN if it needs a token"):
        Remote(url).search(["x"], 1)
    monkeypatch.setenv(listening.RETRIEVER_TOKEN, "a secret of this test")
    assert Remote(url).search(["x"], 1) == [[]]


@pytest.mark.parametrize(
    ("command", "flags"),
    [(retrieve, ["--corpus", __file__, "--serve"]), (rollout_worker, ["--preset", "tiny", "--retriever", "none"])],
)
def test_a_port_in_use_shows_before_anything_is_loaded(monkeypatch, capsys, command, flags):
    monkeypatch.setattr(retrieve, "read_setup", lambda *arguments: pytest.fail("it loads"))
    monkeypatch.setattr(rollout_service, "build_service", lambda *arguments: pytest.fail("it loads"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert command.main([*flags, "--port", str(port)]) == 1
    assert shows(capsys.readouterr().err, "cannot-listen", "127.0.0.1", port)
