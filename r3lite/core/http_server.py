"""A server of JSON over HTTP: reads requests and replies with what a service answers, or with its error.

Errors are {"error": "..."}. GET /health says that the server is there. Requests are not logged: they hold people's
questions.
"""

import hmac
import json
import socket
import sys
import threading
import time
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Protocol

from r3lite.core.errors import R3LiteError
from r3lite.core.listening import host_of, is_loopback, listen
from r3lite.core.records import InvalidRecord, Record, Source, parse

TIMEOUT = 60.0  # seconds of a read: a client that stalls gives its thread back
PATIENCE = 10.0  # seconds for which the end of the server waits for clients that are being answered


class UnknownPath(Exception):
    """A request to a path that a service does not have."""


class HttpService(Protocol):
    """The answers of a server, whose threads call it at the same time."""

    largest: int  # bytes of a request
    token: str | None  # which every request but GET /health then carries as `Authorization: Bearer ...`
    raw: tuple[str, ...]  # what the paths begin with whose requests are bytes
    one_at_a_time: threading.Lock  # held by an answer while it computes

    def answer(self, path: str, request: Record | bytes | None) -> dict:
        """Returns the reply to a request, None for GET.

        Raises InvalidRecord if it is wrong, UnknownPath, R3LiteError if it cannot be answered, and OSError or
        RuntimeError if the service fails. Others are errors of ours.
        """
        ...


class Handler(BaseHTTPRequestHandler):
    """One connection to a `Server`."""

    timeout = TIMEOUT
    server: "Server"

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
        self._answer(self.rfile.read(int(length)))

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
        status, reply = self._reply(body)
        self._say(status, reply)

    def _reply(self, body: bytes | None) -> tuple[int, dict]:
        """Returns status and body of the reply to a request."""
        service = self.server.service
        try:
            is_json = body is not None and not self.path.startswith(service.raw)
            request = Record(parse(body), Source("")) if is_json else body
            return 200, service.answer(self.path, request)
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
        self.close_connection = status != 200  # the remainder of the request is not read
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments) -> None:
        """Nothing is logged."""


class Server(ThreadingHTTPServer):
    """Listens at an address; `serve_forever` answers. Raises R3LiteError if the address is taken."""

    def __init__(self, service: HttpService, host: str, port: int, listening: socket.socket | None = None):
        """`listening`: a socket that listens at the address already, which the server takes over."""
        self.service = service
        self._answering = set()  # requests under way, by their sockets
        if listening is None:
            listening = listen(host, port)
        self.address_family = listening.family
        super().__init__(listening.getsockname(), Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.server_name, self.server_port = listening.getsockname()[:2]
        self.on_loopback = is_loopback(self.server_name)

    def process_request_thread(self, request, client_address) -> None:
        self._answering.add(request)
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._answering.discard(request)

    def handle_error(self, request, client_address) -> None:
        """Prints no traceback if a client has disconnected, which is not an error of the server."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        """Ends after the answers under way. None begins then: a thread that computes while Python ends aborts it."""
        super().server_close()
        end = time.monotonic() + PATIENCE
        while self._answering and time.monotonic() < end:
            time.sleep(0.05)
        self.service.one_at_a_time.acquire(timeout=PATIENCE)
