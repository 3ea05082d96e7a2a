"""Malformed HTTP requests to the three servers of r3lite, each of which runs in a process of its own."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

from bench.stress.generated import ANSWERED, MEMORY_LIMIT, REFUSED, Example, Outcome, changed_json, is_json
from bench.stress.watching import ROOT, TINY, WORLD

# A server waits 30 s for the rest of a request.
REPLY_TIMEOUT = 40.0  # seconds to wait for a reply to a complete request
# Seconds to wait for a reply to a request that may be incomplete. Then the client closes its side of the connection.
SILENCE_TIMEOUT = 2.0
CHAT = {"model": "chat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0.7}
SHORT = ("--adapter", "none", "--retriever", "none", "--max-new-tokens", "4", "--max-hops", "1")
# The command of each server.
COMMANDS = {
    "serve": ["serve", *TINY, *SHORT, "--requests-per-minute", "1000000"],
    "retrieve": ["retrieve", "--serve", "--corpus", str(WORLD / "corpus.jsonl"), "--encoder", "hashing"],
    "rollout_worker": ["rollout_worker", *TINY, "--retriever", "none", "--max-new-tokens", "4", "--max-hops", "1"],
}
# The sound requests to each server: method, path, and value of the body (None: no body).
SOUND = {
    "serve": (
        ("POST", "/generate", {"query": "Hi", "mode": "chat", "conversation": "c1", "stream": False}),
        ("POST", "/v1/chat/completions", CHAT),
        ("GET", "/v1/models", None),
    ),
    "retrieve": (
        ("POST", "/retrieve", {"queries": ["Where is it?", "Who?"], "topk": 2, "return_scores": True}),
        ("GET", "/health", None),
    ),
    "rollout_worker": (
        ("POST", "/sample", {"identity": "x", "adapter": "y", "questions": [], "episodes": []}),
        ("GET", "/version", None),
    ),
}  # fmt: skip
METHODS = ("BREW", "get", "OPTIONS", "HEAD", "PUT", "DELETE", "TRACE", "CONNECT", "", "P\0ST")
TARGETS = (
    "*", "//evil.example/generate", "http://evil.example/retrieve", "/../../etc/passwd", "/%2e%2e/retrieve", "/%00",
    "/v1/models/..%2fchat", "/sample?x=1", "/adapter/", "/" + "x" * 3000, "/é", "", "/health#x", "/ x",
)  # fmt: skip
VERSIONS = ("HTTP/1.0", "HTTP/1.0", "HTTP/2.0", "HTTP/0.9", "HTTP/1.10", "HTTP/1", "http/1.1", "HTTP/x.1", "", "x")
# Additional lines of the head, and whether a request with such a line may be answered.
EXTRA_LINES = (
    (b"X-A: 1", True), (b"X-A: " + b"x" * 3000, True), (b"Accept: */*;q=9", True), (b"Expect: 100-continue", True),
    (b"X-A : 1", True), (b" folded: 1", True), (b"no colon", True), (b": no name", True), (b"X-A: \0", True),
    (b"X-A: \xff\xfe", True), (b"X-A: a\rb", True), (b"Transfer-Encoding: gzip", True),
    (b"Transfer-Encoding: chunked", True), (b"Content-Length: 3", True), (b"Connection: upgrade\r\nUpgrade: h2c", True),
    (b"Authorization: Bearer \xff", True), (b"Authorization: Basic eDp4", True), (b"Cookie: a=b", True),
    (b"Content-Encoding: gzip", True), (b"Host: localhost", True), (b"Range: bytes=0-1", True),
    (b"\r\n".join(b"X-%d: 1" % i for i in range(300)), True),
    (b"Origin: https://evil.example", False), (b"Origin: null", False), (b"origin:", False),
)  # fmt: skip
# Lines with the host, and whether a request with such a line may be answered.
HOSTS = (
    (b"Host: localhost", True), (b"Host: 127.0.0.1:8000", True), (b"Host: [::1]", True), (b"Host: LOCALHOST", True),
    (b"Host: evil.example", False), (b"Host: localhost.evil.example", False), (b"Host: 10.0.0.1", False),
    (b"Host: localhost@evil.example", False), (b"Host: \xff", False), (b"Host: 0x7f000001.evil", False),
)  # fmt: skip
# Values of the header Content-Length.
LENGTHS = ("-1", "+5", "1e3", "0x10", "", " ", "9" * 30, "5, 5", "٣", "none")
DOUBLE_LINE_END = b"\r\n\r\n"
# Ends of the lines of the head.
LINE_ENDS = (b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r", DOUBLE_LINE_END)


@dataclass(frozen=True)
class RawRequest:
    """The bytes of a request to a server, and which replies are right."""

    server: str
    content: bytes
    is_sound: bool  # whether the reply must have status 200
    may_answer: bool  # whether the reply may have status 200
    is_http: bool  # whether the request names a version of HTTP/1, so that the reply must begin with a status line
    is_whole: bool  # whether the request is complete, so that no server waits for more of it


@st.composite
def requests(draw: st.DrawFn) -> Example:
    """Draws a request that is odd in up to two parts; without an odd part it is sound."""
    server = draw(st.sampled_from(list(SOUND)))
    method, target, value = draw(st.sampled_from(SOUND[server]))
    odd_parts = draw(
        st.sets(
            st.sampled_from(("method", "target", "version", "line", "host", "body", "body", "length", "end")),
            max_size=2,
        )
    )
    names = [f"{server} {method} {target}"]
    may_answer = True
    version = "HTTP/1.1"
    host = HOSTS[0][0]
    lines = []
    end = b"\r\n"
    body = b"" if value is None else json.dumps(value).encode()
    if "method" in odd_parts:
        method = draw(st.sampled_from(METHODS))
        names.append(f"method {method!r}")
    if "target" in odd_parts:
        target = draw(st.sampled_from(TARGETS))
        names.append(f"target {target[:40]!r}")
    if "version" in odd_parts:
        version = draw(st.sampled_from(VERSIONS))
        names.append(f"version {version!r}")
    if "line" in odd_parts:
        line, is_allowed = draw(st.sampled_from(EXTRA_LINES))
        lines.append(line)
        names.append(f"line {line[:30]!r}")
        # r3lite.serve may answer requests of other origins: because of their content type, a browser first asks for
        # permission.
        may_answer = is_allowed or server == "serve"
    if "host" in odd_parts:
        host, is_allowed = draw(st.sampled_from(HOSTS))
        names.append(f"{host!r}")
        may_answer = may_answer and is_allowed
    if "body" in odd_parts and value is not None:
        name, body = draw(changed_json(value))
        names.append(f"body {name}")
        may_answer = may_answer and is_json(body)
    size = str(len(body))
    if "length" in odd_parts:
        size = draw(st.sampled_from((*LENGTHS, str(len(body) + 5), str(max(0, len(body) - 3)))))
        names.append(f"length {size!r}")
        if value is not None and size != str(len(body)):
            may_answer = may_answer and size.isascii() and size.isdecimal() and int(size) == 0
    if "end" in odd_parts:
        end = draw(st.sampled_from(LINE_ENDS))
        names.append(f"line end {end!r}")
        # With this end the head is over after its first line, and the lines that forbid an answer are not part of it.
        may_answer = may_answer or end == DOUBLE_LINE_END
    request_line = " ".join((method, target, version)).encode()
    head = [request_line, host, b"Content-Type: application/json", b"Content-Length: " + size.encode(), *lines]
    if version == "HTTP/1.1":
        head.append(b"Connection: close")
    content = end.join((*head, b"", body))
    request = RawRequest(
        server,
        content,
        is_sound=not odd_parts,
        may_answer=may_answer,
        is_http=version.upper().startswith("HTTP/1"),
        is_whole=odd_parts <= {"host", "body"},
    )
    return Example(", ".join(names), request)


class ServerProcess:
    """A server in a process of its own; its output and its peak memory can be read (Linux)."""

    def __init__(self, name: str, folder: Path):
        with socket.create_server(("127.0.0.1", 0)) as free_socket:
            self.port = free_socket.getsockname()[1]
        self.log = folder / f"{name}.log"
        self.health_path = "/api/health" if name == "serve" else "/health"
        command = [sys.executable, "-m", f"r3lite.{COMMANDS[name][0]}", *COMMANDS[name][1:], "--port", str(self.port)]
        environment = os.environ | {"PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT)), "OMP_NUM_THREADS": "1"}
        with open(self.log, "wb") as file:
            self.process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
        while not self.is_healthy():
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.2)

    def is_healthy(self) -> bool:
        """Returns whether the server answers a sound request."""
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}{self.health_path}") as reply,
        ):
            return reply.status == 200
        return False

    def peak_mib(self) -> float:
        """Returns the peak resident memory of the server so far, in MiB."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s*(\d+)", text)[1]) / 1024

    def ask(self, content: bytes, is_whole: bool = True) -> bytes:
        """Sends the bytes of a request; returns all bytes that the server sends until it closes the connection."""
        timeout = REPLY_TIMEOUT if is_whole else SILENCE_TIMEOUT
        reply = bytearray()
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=timeout)
        with connection, contextlib.suppress(ConnectionError):  # the server may close it before all bytes were sent
            connection.sendall(content)
            while True:
                try:
                    data = connection.recv(1 << 16)
                except TimeoutError:
                    if connection.gettimeout() == REPLY_TIMEOUT:
                        raise
                    connection.settimeout(REPLY_TIMEOUT)
                    connection.shutdown(socket.SHUT_WR)
                    continue
                if not data:
                    break
                reply += data
        return bytes(reply)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Requests:
    """The attack with HTTP requests to the three servers."""

    strategy = requests()

    def __init__(self, folder: Path):
        self.servers = {name: ServerProcess(name, folder) for name in COMMANDS}
        # Servers reserve memory at their first requests. Sound requests come first, so that this counts for no example.
        for name, server in self.servers.items():
            for method, target, value in SOUND[name]:
                body = b"" if value is None else json.dumps(value).encode()
                head = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                reply = server.ask(head.encode() + body)
                assert b" 200 " in reply[:15], reply

    def judge(self, example: Example) -> Outcome:
        """Sends a request: the reply must be right, without a traceback, and the server must stay healthy."""
        request: RawRequest = example.content
        server = self.servers[request.server]
        peak_before = server.peak_mib()
        log_size = server.log.stat().st_size
        reply = server.ask(request.content, request.is_whole)
        problem = flaw_of(reply, request)
        way = ANSWERED if re.match(rb"HTTP/1\.[01] 200 ", reply) else REFUSED
        log = server.log.read_bytes()[log_size:].decode(errors="replace")
        if "Traceback" in log:
            problem = f"a traceback: {log[-300:]}"
        elif not problem and server.peak_mib() - peak_before > MEMORY_LIMIT:
            problem = f"it took {server.peak_mib() - peak_before:.0f} MiB"
        elif not problem and not server.is_healthy():
            problem = "then a sound request is not answered"
        return Outcome(way, problem)

    def close(self) -> None:
        for server in self.servers.values():
            server.close()


def flaw_of(reply: bytes, request: RawRequest) -> str:
    """Returns what is wrong with a reply; "" if it is right. An empty reply is a refusal."""
    if request.is_sound and not re.match(rb"HTTP/1\.[01] 200 ", reply):
        return f"a sound request was not answered: {reply[:300]!r}"
    if not reply:
        return ""
    match = re.match(rb"HTTP/1\.[01] (\d{3}) ", reply)
    if not match:
        # The reply to a request without a version, as in HTTP/0.9, has no status line.
        return f"no reply of HTTP: {reply[:200]!r}" if request.is_http else ""
    status = int(match[1])
    if status == 200:
        return "" if request.may_answer else f"it was answered: {reply[:300]!r}"
    # 501: not implemented. 505: version not supported.
    if status in (501, 505) or 200 < status < 500:
        return ""
    return f"status {status}: {reply[-300:]!r}"
