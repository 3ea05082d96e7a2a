"""A server of a retriever, for other machines: HTTP as Search-R1's servers speak it.

POST /retrieve takes {"queries": [...], "topk": k, "return_scores": true} and gives {"result": [[{"document": {...},
"score": s}, ...] per query]}. A document has `id` and `contents`, whose first line is the title in quotes; here also
`title`, `text` and `source`. POST /rerank, if there is a reranker, takes {"query", "documents": [text, ...]} and gives
{"result": [{"index": i, "score": s}, ...]}, best first. GET /health says that the server is there. Errors are
{"error": "..."}.
"""

import json
import re
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from r3lite.core.episode import Document, Failure, Question, Retrieve
from r3lite.core.errors import explained
from r3lite.core.records import WHOLE, InvalidRecord, Record, Source, parse
from r3lite.retrieval.retriever import build_retriever
from r3lite.retrieval.setup import Setup

TIMEOUT = 60.0  # seconds of a read: a client that stalls gives its thread back
LARGEST = 4 << 20  # bytes of a request
MOST_QUERIES, MOST_PASSAGES = 4096, 1000  # that are answered and ranked at once
LOOPBACK = ("127.0.0.1", "::1", "localhost", "[::1]")


class Service:
    """What the server answers. One request at a time, as each computes on all cores."""

    def __init__(self, retrieve: Retrieve, rerank: Callable[[list[tuple[str, str]]], list[float]] | None, most: int):
        """`retrieve` brings `most` documents a query; `rerank` scores pairs of a query and a passage."""
        self.retrieve, self.rerank, self.most = retrieve, rerank, most
        self._one_at_a_time = threading.Lock()

    def answer(self, path: str, request: Record) -> dict:
        """The reply to a request; raises InvalidRecord if it is wrong, LookupError for an unknown path, and OSError if
        the retriever fails."""
        if path == "/retrieve":
            return self._retrieved(request)
        if path == "/rerank" and self.rerank:
            return self._ranked(request)
        raise LookupError(path)

    def _retrieved(self, request: Record) -> dict:
        queries, topk = request.texts("queries"), request.whole("topk", self.most, low=1, high=WHOLE)
        if len(queries) > MOST_QUERIES or topk > self.most:
            raise InvalidRecord(f"at most {MOST_QUERIES} queries and {self.most} documents of each (--top-k)")
        with self._one_at_a_time:
            found = self.retrieve([(Question(str(i), query, ()), query) for i, query in enumerate(queries)])
        if failed := next((outcome for outcome in found if isinstance(outcome, Failure)), None):
            raise OSError(failed.reason)
        scores = request.flag("return_scores", False)
        return {"result": [[_entry(d, scores) for d in documents[:topk]] for documents in found]}

    def _ranked(self, request: Record) -> dict:
        query, documents = request.text("query"), request.texts("documents")
        if len(documents) > MOST_PASSAGES:
            raise InvalidRecord(f"at most {MOST_PASSAGES} documents")
        with self._one_at_a_time:
            scores = self.rerank([(query, document) for document in documents])
        order = sorted(range(len(scores)), key=lambda i: -scores[i])
        return {"result": [{"index": i, "score": scores[i]} for i in order]}


class Handler(BaseHTTPRequestHandler):
    """One connection to a `Server`."""

    timeout = TIMEOUT
    server: "Server"

    def parse_request(self) -> bool:
        """Also refuses what a web page sends, even one elsewhere whose own name resolves to this machine."""
        if not super().parse_request():
            return False
        host = re.sub(r":\d+$", "", self.headers.get("host") or LOOPBACK[0])
        is_ours = "origin" not in self.headers and (host in LOOPBACK or not self.server.on_loopback)
        if not is_ours:
            self._say(403, {"error": "web pages are not answered"})
        return is_ours

    def do_GET(self) -> None:
        if self.path == "/health":
            self._say(200, {"status": "ok"})
        else:
            self._say(404, {"error": "not found"})

    def do_POST(self) -> None:
        length = self.headers.get("content-length", "")
        if not length.isdecimal() or len(length) > 9 or int(length) > LARGEST:
            self._say(413, {"error": f"a content-length is needed, of at most {LARGEST >> 20} MiB"})
            return
        try:
            request = Record(parse(self.rfile.read(int(length)).decode()), Source(""))
            self._say(200, self.server.service.answer(self.path, request))
        except InvalidRecord as error:
            self._say(400, {"error": error.cause})
        except UnicodeDecodeError:
            self._say(400, {"error": "not UTF-8"})
        except LookupError:
            self._say(404, {"error": "not found"})
        except OSError as error:
            self._say(503, {"error": str(error)})

    def _say(self, status: int, body: dict) -> None:
        data = json.dumps(body).encode()
        self.close_connection = status != 200  # what is left of the request is not read
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments) -> None:
        """Requests are not logged: they hold people's questions."""


class Server(ThreadingHTTPServer):
    """Listens at an address; `serve_forever` answers. Raises R3LiteError if the address is taken."""

    request_queue_size = 128  # connections that wait to be accepted; by default 5, and others wait for seconds

    def __init__(self, service: Service, host: str, port: int):
        self.service = service
        with explained(OSError, f"{host}:{port} cannot be listened on", "Pass another --port."):
            super().__init__((host, port), Handler)
        self.on_loopback = self.server_address[0] in LOOPBACK

    def handle_error(self, request, client_address) -> None:
        """A client that went away is no error of the server, and needs no traceback."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def serve(setup: Setup, host: str, port: int) -> None:
    """Serves the retriever of a setup, and its reranker, until it is interrupted."""
    settings = setup.settings
    service = Service(build_retriever(setup), setup.reranker.scores if settings.rerank else None, settings.top_k)
    server = Server(service, host, port)
    host, port = server.server_address[:2]
    print(f"serving     http://{host}:{port}/retrieve, up to {settings.top_k} documents a query (--top-k)", flush=True)
    if not server.on_loopback:
        print("warning: anyone who can reach this address can send queries", file=sys.stderr)
    with server:
        server.serve_forever()


def _entry(document: Document, with_score: bool) -> dict:
    contents = f'"{document.title}"\n{document.text}'
    made = {**document.to_json(), "contents": contents, "source": document.source}
    return {"document": made, "score": document.score} if with_score else made
