"""A server of JSON over HTTP: reads requests, passes them to a service, and sends its answers or errors.

Errors are {"error": "..."}. GET /health tells that the server runs. Requests are not logged, because they hold people's
questions. A connection has one request; `core.listening.ConnectionLimits` limits it. If the client disconnects while it
waits for its turn, no answer is computed.
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

LONGEST_ERROR = 200  # the most characters of an error that may quote the request
# When the server closes, it waits at most so many seconds for requests under way, and again for an answer that is being
# computed.
PATIENCE = 10.0


class UnknownPath(Exception):
    """A request to a path that a service does not have."""


class Disconnected(Exception):
    """The client has closed its connection: nobody would read the reply."""


class Peer:
    """The client of a request: tells whether it is still connected. Only the thread of the request uses it."""

    def __init__(self, connection: socket.socket, poll_seconds: float):
        self._connection = connection
        self._poll_seconds = poll_seconds

    def check_connected(self) -> None:
        """Raises Disconnected if the client has closed its connection."""
        timeout = self._connection.gettimeout()
        self._connection.settimeout(0)
        try:
            is_open = self._connection.recv(1, socket.MSG_PEEK) != b""  # b"": closed
        except BlockingIOError:  # open, and nothing to read
            is_open = True
        except OSError:
            is_open = False
        finally:
            self._connection.settimeout(timeout)
        if not is_open:
            raise Disconnected

    @contextlib.contextmanager
    def holding(self, lock: threading.Lock) -> Iterator[None]:
        """Holds a lock while its block runs. Raises Disconnected if the client disconnects before the lock is free."""
        while not lock.acquire(timeout=self._poll_seconds):
            self.check_connected()
        try:
            self.check_connected()
            yield
        finally:
            lock.release()


class TimedReader(io.RawIOBase):
    """Reads a connection for some seconds in all; raises TimeoutError afterwards, even if bytes still arrive."""

    def __init__(self, connection: socket.socket, seconds: float):
        self._connection = connection
        self._end = time.monotonic() + seconds

    def extend(self, seconds: float) -> None:
        """Lengthens the time by `seconds`."""
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
    """What answers the requests of a server. Several threads call it at the same time."""

    largest: int  # the most bytes of a request
    token: str | None  # if not None, every request but GET /health must carry it as `Authorization: Bearer ...`
    raw: tuple[str, ...]  # prefixes of paths whose requests are bytes; requests to other paths are JSON
    one_at_a_time: threading.Lock  # `answer` holds it while it computes

    def answer(self, path: str, request: Record | bytes | None, peer: Peer) -> dict:
        """Returns the reply to a request of `peer`; the `request` of a GET is None.

        Raises Disconnected if the peer has disconnected, InvalidRecord if the request is wrong, UnknownPath if the
        service lacks the path, R3LiteError if it cannot answer this request, and OSError or RuntimeError if the service
        fails. Any other exception is a bug.
        """
        ...


class Handler(BaseHTTPRequestHandler):
    """Answers the one request of a connection. (HTTP/1.0, the default of the base class, has one request.)"""

    server: "Server"

    def setup(self) -> None:
        """Replaces the base class's reader by one with a limit of time."""
        super().setup()
        self.rfile.close()
        self._reader = TimedReader(self.connection, self.server.limits.seconds)
        self.rfile = io.BufferedReader(self._reader)

    def parse_request(self) -> bool:
        """Reads the head of the request; returns False if it was refused.

        Requests of web pages are refused, too: those with an Origin, which browsers send. If only this machine can
        reach the server, the Host must be a loopback host as well. This refuses pages of a site that makes its own name
        resolve to this machine (DNS rebinding).
        """
        if not super().parse_request():
            return False
        host = host_of(self.headers.get("host") or "localhost")
        is_allowed = "origin" not in self.headers and (is_loopback(host) or not self.server.on_loopback)
        if not is_allowed:
            self._send(403, {"error": "requests from web pages are not allowed"})
        return is_allowed

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(200, {"status": "ok"})
        elif self._check_token():
            self._answer(None)

    def do_POST(self) -> None:
        length = self.headers.get("content-length", "")
        largest = self.server.service.largest
        if not self._check_token():
            return
        if not length.isdecimal() or len(length) > 9 or int(length) > largest:
            self._send(413, {"error": f"Content-Length is missing or larger than {largest >> 20} MiB"})
            return
        size = int(length)
        limits = self.server.limits
        self._reader.extend(limits.seconds_for(size) - limits.seconds)  # by the time that the body needs
        body = self.rfile.read(size)
        if len(body) == size:  # otherwise the client has disconnected in the middle of the body
            self._answer(body)

    def _check_token(self) -> bool:
        """Returns whether the request carries the service's token, if there is one; otherwise sends an error."""
        token = self.server.service.token
        if token is None:
            return True
        authorization = self.headers.get("authorization", "").encode("utf-8", "replace")
        if hmac.compare_digest(authorization, f"Bearer {token}".encode()):
            return True
        self._send(401, {"error": "the token is missing or wrong: send Authorization: Bearer TOKEN"})
        return False

    def _answer(self, body: bytes | None) -> None:
        """Sends the reply to a request with this body (None: a GET); nothing if the client has disconnected."""
        with contextlib.suppress(Disconnected):
            status, reply = self._reply(body)
            self._send(status, reply)

    def _reply(self, body: bytes | None) -> tuple[int, dict]:
        """Returns status and body of the reply to a request with this body; raises Disconnected."""
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
        except Exception:  # a bug: the client gets a reply, and the log has the details
            traceback.print_exc(file=sys.stderr)
            return 500, {"error": "internal error, see the server's log"}

    def _send(self, status: int, body: dict) -> None:
        """Sends a reply with this status and JSON body."""
        data = json.dumps(body).encode()
        self.connection.settimeout(self.server.limits.seconds_for(len(data)))
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Sends an error as JSON. The base class calls this for malformed requests, and would send a page of HTML."""
        # Without this, the reply to a request line without a version would have no head.
        self.request_version = self.protocol_version
        self._send(code, {"error": (message or HTTPStatus(code).phrase)[:LONGEST_ERROR]})

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
        """If `listening`, a socket that listens already, is given, the server takes it over instead of the address."""
        self.service = service
        self.limits = limits
        self._open_connections: set[socket.socket] = set()
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
        if len(self._open_connections) >= self.limits.connections:
            self._refuse(request)
            return
        self._open_connections.add(request)
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._open_connections.discard(request)
            raise

    def process_request_thread(self, request, client_address) -> None:
        """Answers a connection on this thread; afterwards the connection no longer counts as open."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._open_connections.discard(request)

    def _refuse(self, request: socket.socket) -> None:
        """Replies, without waiting, that there are too many connections, and closes this one."""
        body = json.dumps({"error": "the server has too many connections, try again soon"}).encode()
        head = b"HTTP/1.0 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
        request.setblocking(False)
        with contextlib.suppress(OSError):
            request.send(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            # If a request were still unread when the connection is closed, the reply could be lost (a TCP reset).
            request.recv(1 << 16)
        self.shutdown_request(request)

    def handle_error(self, request, client_address) -> None:
        """Prints no traceback if a client has disconnected, which is not an error of the server."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        """Waits for the requests under way, and lets no further answer be computed: see PATIENCE.

        Python aborts if the process ends while a thread computes.
        """
        super().server_close()
        end = time.monotonic() + PATIENCE
        while self._open_connections and time.monotonic() < end:
            time.sleep(0.05)
        self.service.one_at_a_time.acquire(timeout=PATIENCE)  # never released, so that no other answer begins
