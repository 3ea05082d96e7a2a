"""A server of JSON over HTTP: reads requests and replies with what a service answers, or with its error.

Errors are {"error": "..."}. GET /health says that the server is there. Requests are not logged: they hold people's
questions. A connection has one request. What it may take is in `core.listening.ConnectionLimits`; an answer for which
nobody waits any more is not computed.
"""

import contextlib
import hmac
import io
import json
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Protocol

from r3lite.core.errors import R3LiteError
from r3lite.core.listening import CONNECTION_LIMITS, ConnectionLimits, host_of, is_loopback, listen
from r3lite.core.records import InvalidRecord, Record, Source, parse

LONGEST_ERROR = 200  # characters of a refusal that may quote the request
PATIENCE = 10.0  # seconds that the end of the server waits for answers under way, and then for one that computes


class UnknownPath(Exception):
    """A request to a path that a service does not have."""


class Disconnected(Exception):
    """The client has closed its connection: nobody would read the reply."""


class Peer:
    """The client of a request, as far as its connection tells. Used by the thread that answers it."""

    def __init__(self, connection: socket.socket, poll_seconds: float):
        self._connection = connection
        self._poll_seconds = poll_seconds

    def check_connected(self) -> None:
        """Raises Disconnected if the client has closed its connection."""
        timeout = self._connection.gettimeout()
        self._connection.settimeout(0)
        try:
            is_open = self._connection.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:  # nothing to read, as of a client that waits
            is_open = True
        except OSError:
            is_open = False
        finally:
            self._connection.settimeout(timeout)
        if not is_open:
            raise Disconnected

    @contextlib.contextmanager
    def holding(self, lock: threading.Lock) -> Iterator[None]:
        """Waits for the lock and holds it; raises Disconnected if the client leaves before it has it."""
        while not lock.acquire(timeout=self._poll_seconds):
            self.check_connected()
        try:
            self.check_connected()
            yield
        finally:
            lock.release()


class TimedReader(io.RawIOBase):
    """Reads a connection until a time, however often a byte arrives; raises TimeoutError then."""

    def __init__(self, connection: socket.socket, seconds: float):
        self._connection = connection
        self._end = time.monotonic() + seconds

    def extend(self, seconds: float) -> None:
        """Puts the end off."""
        self._end += seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("the request took too long to arrive")
        self._connection.settimeout(seconds)
        return self._connection.recv_into(buffer)


class HttpService(Protocol):
    """The answers of a server, whose threads call it at the same time."""

    largest: int  # bytes of a request
    token: str | None  # which every request but GET /health then carries as `Authorization: Bearer ...`
    raw: tuple[str, ...]  # prefixes of paths; a request to such a path is bytes, to others JSON
    one_at_a_time: threading.Lock  # held by an answer while it computes

    def answer(self, path: str, request: Record | bytes | None, peer: Peer) -> dict:
        """Returns the reply to a request of `peer`; the `request` of a GET is None.

        Raises Disconnected if the peer has left, InvalidRecord if the request is wrong, UnknownPath, R3LiteError if it
        cannot be answered, and OSError or RuntimeError if the service fails. Others are errors of ours.
        """
        ...


class Handler(BaseHTTPRequestHandler):
    """One connection to a `Server`, with one request: the class of the standard library speaks HTTP/1.0 by default."""

    server: "Server"

    def setup(self) -> None:
        """Reads the connection with a limit of time."""
        super().setup()
        self.rfile.close()
        self._reader = TimedReader(self.connection, self.server.limits.seconds)
        self.rfile = io.BufferedReader(self._reader)

    def parse_request(self) -> bool:
        """Also refuses what a web page sends, even one elsewhere whose own name resolves to this machine."""
        if not super().parse_request():
            return False
        host = host_of(self.headers.get("host") or "localhost")
        is_allowed = "origin" not in self.headers and (is_loopback(host) or not self.server.on_loopback)
        if not is_allowed:
            self._say(403, {"error": "requests from web pages are not allowed"})
        return is_allowed

    def do_GET(self) -> None:
        if self.path == "/health":
            self._say(200, {"status": "ok"})
        elif self._may_ask():
            self._answer(None)

    def do_POST(self) -> None:
        length = self.headers.get("content-length", "")
        largest = self.server.service.largest
        if not self._may_ask():
            return
        if not length.isdecimal() or len(length) > 9 or int(length) > largest:
            self._say(413, {"error": f"Content-Length is missing or larger than {largest >> 20} MiB"})
            return
        size = int(length)
        self._reader.extend(self.server.limits.seconds_for(size) - self.server.limits.seconds)
        body = self.rfile.read(size)
        if len(body) == size:  # else the client has left in the middle of it
            self._answer(body)

    def _may_ask(self) -> bool:
        """Returns whether the request carries the token, if there is one; refuses it otherwise."""
        token = self.server.service.token
        if token is None:
            return True
        authorization = self.headers.get("authorization", "").encode("utf-8", "replace")
        if hmac.compare_digest(authorization, f"Bearer {token}".encode()):
            return True
        self._say(401, {"error": "the token is missing or wrong: send Authorization: Bearer TOKEN"})
        return False

    def _answer(self, body: bytes | None) -> None:
        with contextlib.suppress(Disconnected):
            status, reply = self._reply(body)
            self._say(status, reply)

    def _reply(self, body: bytes | None) -> tuple[int, dict]:
        """Returns status and body of the reply to a request."""
        service = self.server.service
        try:
            is_json = body is not None and not self.path.startswith(service.raw)
            request = Record(parse(body), Source("")) if is_json else body
            peer = Peer(self.connection, self.server.limits.poll_seconds)
            return 200, service.answer(self.path, request, peer)
        except Disconnected:
            raise
        except InvalidRecord as error:
            return 400, {"error": error.cause}
        except UnknownPath:
            return 404, {"error": "not found"}
        except R3LiteError as error:
            return 422, {"error": " ".join(str(error).split())}
        except (OSError, RuntimeError) as error:
            return 503, {"error": str(error)}
        except Exception:  # whatever it is, the client shall not take it for something else
            traceback.print_exc(file=sys.stderr)
            return 500, {"error": "internal error, see the server's log"}

    def _say(self, status: int, body: dict) -> None:
        data = json.dumps(body).encode()
        self.connection.settimeout(self.server.limits.seconds_for(len(data)))
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuses what the standard library takes for no request: as other errors, and not as a page of HTML."""
        self.request_version = self.protocol_version  # else a line without a version has a reply without a head
        self._say(code, {"error": (message or HTTPStatus(code).phrase)[:LONGEST_ERROR]})

    def log_message(self, *arguments) -> None:
        """Nothing is logged."""


class Server(ThreadingHTTPServer):
    """Listens at an address; `serve_forever` answers. Raises R3LiteError if the address is taken."""

    def __init__(
        self,
        service: HttpService,
        host: str,
        port: int,
        listening: socket.socket | None = None,
        limits: ConnectionLimits = CONNECTION_LIMITS,
    ):
        """`listening`: a socket that listens at the address already, which the server takes over."""
        self.service = service
        self.limits = limits
        self._answering: set[socket.socket] = set()  # connections under way
        if listening is None:
            listening = listen(host, port)
        self.address_family = listening.family
        super().__init__(listening.getsockname(), Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.server_name, self.server_port = listening.getsockname()[:2]
        self.on_loopback = is_loopback(self.server_name)

    def process_request(self, request, client_address) -> None:
        """Answers a connection on a thread of its own, or refuses it if there are too many."""
        if len(self._answering) >= self.limits.connections:
            self._refuse(request)
            return
        self._answering.add(request)
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._answering.discard(request)
            raise

    def process_request_thread(self, request, client_address) -> None:
        """Answers a connection, and counts it no longer then."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._answering.discard(request)

    def _refuse(self, request: socket.socket) -> None:
        """Says without waiting that there are too many connections, and closes this one."""
        body = json.dumps({"error": "the server has too many connections, try again soon"}).encode()
        head = b"HTTP/1.0 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
        request.setblocking(False)
        with contextlib.suppress(OSError):
            request.send(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            request.recv(1 << 16)  # a request that is there: what is unread when it is closed would reset it
        self.shutdown_request(request)

    def handle_error(self, request, client_address) -> None:
        """Prints no traceback if a client has disconnected, which is not an error of the server."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        """Ends after the answers under way, and lets no further answer compute.

        Python aborts if it ends while a thread computes.
        """
        super().server_close()
        end = time.monotonic() + PATIENCE
        while self._answering and time.monotonic() < end:
            time.sleep(0.05)
        self.service.one_at_a_time.acquire(timeout=PATIENCE)  # never released
