"""The server's own routes: what is answered, what is refused and how, and that nothing stays behind."""

import http.client
import json
import socket
import threading
import time
from urllib.parse import urlsplit

import pytest

from r3lite.settings import ServerSettings

JSON = {"Content-Type": "application/json"}


def send(running, method, path, body=None, **headers):
    """Status, headers and body of a request."""
    connection = http.client.HTTPConnection(urlsplit(running.url).netloc, timeout=20)
    data = json.dumps(body) if isinstance(body, (dict, list)) else body
    connection.request(method, path, data, {**JSON, **{k.replace("_", "-"): v for k, v in headers.items()}})
    reply = connection.getresponse()
    text = reply.read().decode()
    connection.close()
    return reply.status, dict(reply.getheaders()), text


def generate(running, **body):
    status, _, text = send(running, "POST", "/generate", body)
    return status, json.loads(text)


def events(text):
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]


def free_again(running):
    """Whether soon no ask holds a place, and nothing is being answered."""
    for _ in range(200):
        if not running.desk.places.taken.total() and not running.answering.jobs:
            return True
        time.sleep(0.02)
    return False


def test_an_answer_whole_and_as_a_stream(serving):
    running = serving()
    status, answer = generate(running, query="one two three", mode="search")
    assert status == 200 and answer["question"] == answer["final_answer"] == "one two three"
    assert (answer["mode"], answer["prompt_tokens"], answer["completion_tokens"]) == ("search", 7, 3)
    _, headers, text = send(running, "POST", "/generate", {"query": "one two", "mode": "chat", "stream": True})
    assert headers["content-type"].startswith("text/event-stream")
    stream_events = events(text)
    assert stream_events[0] == {"type": "start", "mode": "chat", "adapter": "sft"}
    assert [e["text"] for e in stream_events[1:-1]] == ["one", " two"] and stream_events[-1]["type"] == "done"
    assert stream_events[-1]["final_answer"] == "one two" and free_again(running)


def test_modes_adapters_and_auto(serving):
    running = serving()
    generate(running, query="who wrote it?", mode="auto")
    generate(running, query="hello", mode="auto")
    generate(running, query="x", mode="chat", adapter="rl")
    assert [(a.mode, a.adapter) for a in running.answering.asks] == [
        ("search", "rl"), ("chat", "sft"), ("chat", "rl")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"query": "x", "mode": "poetry"}, 400, "unknown_mode"),
        ({"query": "x", "adapter": "nope"}, 400, "unknown_adapter"),
        ({"query": "  "}, 400, "empty"),
        ({"query": 5}, 400, "invalid_request"),
        ({}, 400, "invalid_request"),
        ({"query": "x", "top_k": 5}, 400, "invalid_request"),
        ([], 400, "invalid_request"),
        ("{", 400, "invalid_request"),
        ("[" * 100_000, 400, "http_error"),
        ('{"query": "\\ud800"}', 400, "invalid_request"),
        ('{"query": ' + "9" * 10_000 + "}", 400, "http_error"),
        ({"query": "x", "conversation": "a b"}, 400, "invalid_request"),
        ({"query": "x " * 2000}, 400, "context_length_exceeded"),
        ({"query": "x" * 300_000}, 413, "too_large"),
        ({"query": "crash now"}, 500, "failed"),
        ({"query": "no disk"}, 500, "failed"),
    ],
)
def test_errors_have_one_shape_and_tell_no_secrets(serving, body, status, code):
    running = serving()
    got, _, text = send(running, "POST", "/generate", body)
    error = json.loads(text)["error"]
    assert got == status and error["code"] == code
    assert set(error) == {"message", "type", "param", "code"}
    assert "secret" not in text and "/" not in error["message"] and len(error["message"]) < 200
    assert free_again(running)
    assert generate(running, query="still here")[1]["final_answer"] == "still here"


def test_an_error_that_is_not_of_the_question_is_told_in_the_log_only(serving, capsys):
    """Each was taken for a question that is too long, and its cause was told nowhere."""
    running = serving()
    assert generate(running, query="no disk")[0] == 500
    assert "a request failed: /secret/path: the disk is gone" in capsys.readouterr().err
    assert generate(running, query="x " * 2000)[0] == 400
    assert "a request failed" not in capsys.readouterr().err


def test_other_paths_and_methods(serving):
    running = serving()
    assert [send(running, *r)[0] for r in (("GET", "/generate"), ("GET", "/etc/passwd"), ("GET", "/docs"))] == [
        405, 404, 404
    ]  # fmt: skip


def test_a_body_of_unknown_length_is_cut_at_the_limit(serving):
    running = serving(max_body_kib=4)
    address = urlsplit(running.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(9):
            connection.sendall(b"400\r\n" + b"x" * 1024 + b"\r\n")
        assert b" 413 " in connection.recv(1000).split(b"\r\n")[0]


def test_who_goes_away_stops_the_answer(serving):
    running = serving(slow=0.01)
    address = urlsplit(running.url)
    for stream in (False, True):
        body = json.dumps({"query": "word " * 190, "stream": stream}).encode()
        with socket.create_connection((address.hostname, address.port)) as connection:
            head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
            connection.sendall(head.encode() + f"{len(body)}\r\n\r\n".encode() + body)
            while not running.answering.jobs:
                time.sleep(0.01)
            pieces = running.answering.jobs[0]["said"]
        start = time.monotonic()
        assert free_again(running) and time.monotonic() - start < 10 and len(pieces) < 150


def test_a_crash_fails_those_under_way_and_no_one_after(serving):
    running = serving(slow=0.01)
    replies = []
    thread = threading.Thread(target=lambda: replies.append(generate(running, query="word " * 100)))
    thread.start()
    while not running.answering.jobs:
        time.sleep(0.01)
    assert generate(running, query="crash")[0] == 500
    thread.join()
    assert replies[0][0] == 500 and running.answering.restarts == 1
    text = send(running, "POST", "/generate", {"query": "crash", "stream": True})[2]
    assert events(text)[-1] == {
        "type": "error", "code": "failed", "message": "Internal error. See the server's log."
    }  # fmt: skip
    assert generate(running, query="fine")[0] == 200


def test_limits_of_time_of_places_and_of_a_clients_rate(serving):
    running = serving(slow=0.01, request_seconds=0.2)
    status, reply = generate(running, query="word " * 100)
    assert status == 504 and reply["error"]["code"] == "timeout" and free_again(running)

    # A slow retriever delayed the refusal as long as it liked.
    running = serving(request_seconds=0.2)
    running.answering.preparing = 1.0
    start = time.monotonic()
    status, reply = generate(running, query="word")
    assert status == 504 and time.monotonic() - start < 0.9 and free_again(running)

    running = serving(slow=0.01, max_requests=1)
    thread = threading.Thread(target=generate, args=(running,), kwargs={"query": "word " * 50})
    thread.start()
    while not running.answering.jobs:
        time.sleep(0.01)
    status, headers, _ = send(running, "POST", "/generate", {"query": "x"})
    assert status == 503 and headers["retry-after"] == "5"
    thread.join()
    assert generate(running, query="x")[0] == 200

    running = serving(requests_per_minute=2)
    statuses = [send(running, "POST", "/generate", {"query": "x"})[:2] for _ in range(3)]
    assert [s for s, _ in statuses] == [200, 200, 429] and 1 <= int(statuses[2][1]["retry-after"]) <= 30
    assert send(running, "GET", "/api/health")[0] == 200


def test_a_token_is_asked_for_where_answers_are(serving):
    running = serving(token="k" * 20)
    ask = {"query": "x"}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {'k' * 20}"}):
        status, _, text = send(running, "POST", "/generate", ask, **headers)
        assert status == 401 and "k" * 20 not in text
        assert send(running, "GET", "/v1/models", **headers)[0] == 401
        assert send(running, "GET", "/api/about", **headers)[0] == 401  # questions may be private
    assert send(running, "POST", "/generate", ask, Authorization=f"Bearer {'k' * 20}")[0] == 200
    status, _, text = send(running, "GET", "/api/about", Authorization=f"Bearer {'k' * 20}")
    assert status == 200 and json.loads(text)["documents"] == "notes"
    status, _, text = send(running, "GET", "/api/health")
    assert status == 200 and json.loads(text)["needs_token"] and send(running, "GET", "/")[0] == 200


def test_other_origins_and_names(serving):
    running = serving()
    origin = {"Origin": "https://example.org"}
    assert "access-control-allow-origin" not in send(running, "POST", "/generate", {"query": "x"}, **origin)[1]
    # A page elsewhere whose own name resolves to this machine, and a form, which needs no permission.
    assert send(running, "GET", "/api/health", Host="example.org")[0] == 400
    for name in ("127.0.0.2:8000", "[::1]:8000", "LocalHost"):  # also of this machine alone
        assert send(running, "GET", "/api/health", Host=name)[0] == 200
    assert send(running, "POST", "/generate", '{"query": "x"}', Content_Type="text/plain")[0] == 400
    assert "Content-Type must be application/json" in send(running, "POST", "/generate", "{}", Content_Type="")[2]
    named = serving(server=ServerSettings(cors_origins=("https://example.org",)))
    allowed = send(named, "POST", "/generate", {"query": "x"}, **origin)[1]["access-control-allow-origin"]
    assert allowed == "https://example.org"
    assert "access-control-allow-origin" not in send(named, "GET", "/api/health", Origin="https://evil.example")[1]


def test_a_page_of_an_allowed_origin_may_send_what_its_client_sends(serving):
    """A browser asks for every header first: of the 11 of OpenAI's JavaScript client 9 were refused."""
    running = serving(server=ServerSettings(cors_origins=("https://example.org",)))
    headers = "authorization,content-type,x-stainless-lang,x-stainless-retry-count,openai-organization,x-of-next-year"
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": headers}
    status, answered, _ = send(running, "OPTIONS", "/v1/chat/completions", Origin="https://example.org", **preflight)
    allowed = answered["access-control-allow-headers"].replace(" ", "").split(",")
    assert status == 200 and {*headers.split(",")} <= {*allowed}
    assert "access-control-allow-credentials" not in answered
    assert send(running, "OPTIONS", "/v1/chat/completions", Origin="https://evil.example", **preflight)[0] == 400
    reply = send(running, "GET", "/api/health", Origin="https://example.org")[1]
    assert reply["access-control-expose-headers"] == "Retry-After"


def test_a_conversation_is_remembered_and_its_last_turn_tried_again(serving):
    running = serving()
    for body in ({"query": "one"}, {"query": "two"}, {"query": "two", "retry": True}, {"query": "three"}):
        generate(running, conversation="c-1", **body)
    generate(running, query="alone")
    generate(running, query="other", conversation="c-2")
    histories = [[m["content"] for m in a.earlier] for a in running.answering.asks]
    assert histories == [[], ["one", "one"], ["one", "one"], ["one", "one", "two", "two"], [], []]


def test_many_at_once_each_get_their_own(serving):
    running = serving()
    replies = {}

    def ask(i):
        replies[i] = generate(running, query=f"number {i} " * 5)[1]["final_answer"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert replies == {i: (f"number {i} " * 5).strip() for i in range(32)} and free_again(running)


def test_auto_does_not_choose_what_no_adapter_has_learned(serving):
    running = serving()
    generate(running, query="how many apples are 3 and 4")
    running.answering.learned_modes.remove("reasoning")
    generate(running, query="how many apples are 3 and 4")
    assert [ask.mode for ask in running.answering.asks] == ["reasoning", "search"]
    running.answering.missing["search"] = "nothing to search"
    del running.answering.modes["search"]
    running.answering.learned_modes.remove("search")
    generate(running, query="how many apples are 3 and 4")
    assert running.answering.asks[-1].mode == "chat"
    status, reply = generate(running, query="x", mode="search")
    assert status == 400 and "nothing to search; choose from chat, reasoning, auto" in str(reply)


def test_the_health_and_the_page(serving):
    running = serving()
    status, _, text = send(running, "GET", "/api/health")
    assert status == 200 and json.loads(text)["requests"] == {"active": 0, "free": 128}
    status, headers, page = send(running, "GET", "/")
    assert status == 200 and page.startswith("<!doctype html>")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe" not in policy


def test_an_ask_that_fails_for_a_reason_of_its_own_ends_no_other(serving):
    running = serving(slow=0.05)
    replies = []
    words = " ".join(["one two three four"] * 5)
    thread = threading.Thread(target=lambda: replies.append(generate(running, query=words)))
    thread.start()
    while not running.answering.jobs:
        time.sleep(0.01)
    status, answer = generate(running, query="stumble")
    assert (status, answer["error"]["code"]) == (500, "failed") and not replies  # while the other one is answered
    thread.join()
    assert replies[0][1]["final_answer"] == words and not running.answering.restarts
    assert free_again(running)
