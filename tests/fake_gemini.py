"""A local server that answers as Gemini's `generateContent` does, by script."""

import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from r3lite.settings import JudgeSettings

KEY = "secret-key-0123456789"


@dataclass
class Answer:
    """What the server says to one request."""

    body: object
    status: int = 200
    headers: dict = field(default_factory=dict)
    delay: float = 0.0
    drip: str = ""  # "body" or "headers" come a byte at a time
    endless: bool = False  # the body has no end


def text_reply(text, finish="STOP", tokens=(100, 10), **fields):
    """A reply with a text; `tokens` are those read and those written."""
    candidate = {"content": {"role": "model", "parts": [{"text": text}]}, "finishReason": finish}
    usage = {"promptTokenCount": tokens[0], "candidatesTokenCount": tokens[1], "totalTokenCount": sum(tokens)}
    return Answer({"candidates": [candidate], "usageMetadata": usage}, **fields)


def error_reply(status, message="no", name="", headers=None, details=()):
    error = {"code": status, "message": message, "status": name, "details": list(details)}
    return Answer({"error": error}, status, headers or {})


class FakeGemini:
    """`script` is said in order, its last entry again and again; or it is a function of the request's JSON."""

    def __init__(self):
        self.script, self.requests, self.at_once, self._in_flight = [], [], 0, 0
        self.given_up = self.sent = 0  # replies that the client did not wait for; bytes of endless bodies
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                answer = fake._next(self.path, dict(self.headers), body)
                time.sleep(answer.delay)
                with fake._lock:
                    fake._in_flight -= 1
                data = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
                try:
                    self.answer(answer, data)
                except OSError:
                    fake.given_up += 1  # the client has
                    self.close_connection = True

            def answer(self, answer, data):
                if answer.drip == "headers":
                    self.drip(b"HTTP/1.1 200 OK\r\nx-slow: " + b"x" * 1000)
                self.send_response(answer.status)
                for name, value in {"content-type": "application/json", **answer.headers}.items():
                    self.send_header(name, value)
                if not answer.endless:
                    self.send_header("content-length", str(len(data)))
                self.end_headers()
                if answer.drip == "body":
                    self.drip(data + b" " * 1000)
                self.wfile.write(data)
                for _ in range(answer.endless * 1000):  # 64 MB: enough to fail a test, and no danger
                    fake.sent += self.wfile.write(b" " * 65536)

            def drip(self, data):
                for byte in data:
                    self.wfile.write(bytes([byte]))
                    time.sleep(0.05)

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def _next(self, path, headers, body):
        with self._lock:
            self._in_flight += 1
            self.at_once = max(self.at_once, self._in_flight)
            self.requests.append((path, headers, body))
            if callable(self.script):
                return self.script(body)
            return self.script.pop(0) if len(self.script) > 1 else self.script[0]


@pytest.fixture
def gemini(monkeypatch):
    monkeypatch.setenv("GOOGLE_API_KEY", KEY)
    monkeypatch.delenv("GEMINI_API_KEY", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    fake = FakeGemini()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


class Clock:
    """A clock that goes on only when somebody sleeps."""

    def __init__(self):
        self.now, self.slept, self._lock = 1000.0, [], threading.Lock()

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        with self._lock:
            self.now += seconds
            self.slept.append(seconds)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def client(gemini, clock):
    """Makes a client of the fake server whose time passes only when it sleeps."""
    from r3lite.llm.client import Client

    def make(cache=None, **settings):
        settings = {"judge": "gemini", "judge_base_url": gemini.url, "judge_timeout": 20.0} | settings
        return Client(JudgeSettings(**settings), cache, clock=clock, sleep=clock.sleep)

    return make
