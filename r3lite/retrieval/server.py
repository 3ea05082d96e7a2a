"""A server of a retriever, for other machines: HTTP as Search-R1's servers speak it.

POST /retrieve takes {"queries": [...], "topk": k, "return_scores": true} and gives {"result": [[{"document": {...},
"score": s}, ...] per query]}. A document has `id` and `contents`, whose first line is the title in quotes; here also
`title`, `text` and `source`. POST /rerank, if there is a reranker, takes {"query", "documents": [text, ...]} and gives
{"result": [{"index": i, "score": s}, ...]}, best first. The rest is in core/http_server.py.
"""

import socket
import threading
from collections.abc import Callable

from r3lite.core.episode import Document, Failure, Question, Retrieve
from r3lite.core.http_server import Server, UnknownPath
from r3lite.core.listening import url_of
from r3lite.core.records import WHOLE, InvalidRecord, Record
from r3lite.retrieval.retriever import build_retriever
from r3lite.retrieval.setup import Setup

MOST_QUERIES, MOST_PASSAGES = 4096, 1000  # that are answered and ranked at once


class Service:
    """What the server answers. One request at a time, as each computes on all cores."""

    largest, raw = 4 << 20, ()

    def __init__(
        self,
        retrieve: Retrieve,
        rerank: Callable[[list[tuple[str, str]]], list[float]] | None,
        most: int,
        token: str | None = None,
    ):
        """`retrieve` gives `most` documents a query; `rerank` scores pairs of a query and a passage."""
        self.retrieve, self.rerank, self.most, self.token = retrieve, rerank, most, token
        self.one_at_a_time = threading.Lock()

    def answer(self, path: str, request: Record | None) -> dict:
        """The reply to a request, as core.http_server.Service says; OSError if the retriever fails."""
        if path == "/retrieve" and request:
            return self._retrieved(request)
        if path == "/rerank" and request and self.rerank:
            return self._ranked(request)
        raise UnknownPath(path)

    def _retrieved(self, request: Record) -> dict:
        queries, topk = request.texts("queries"), request.whole("topk", self.most, low=1, high=WHOLE)
        if len(queries) > MOST_QUERIES or topk > self.most:
            raise InvalidRecord(f"at most {MOST_QUERIES} queries and {self.most} documents per query (--top-k)")
        with self.one_at_a_time:
            found = self.retrieve([(Question(str(i), query, ()), query) for i, query in enumerate(queries)])
        if failed := next((outcome for outcome in found if isinstance(outcome, Failure)), None):
            raise OSError(failed.reason)
        scores = request.flag("return_scores", False)
        return {"result": [[_entry(d, scores) for d in documents[:topk]] for documents in found]}

    def _ranked(self, request: Record) -> dict:
        query, documents = request.text("query"), request.texts("documents")
        if len(documents) > MOST_PASSAGES:
            raise InvalidRecord(f"at most {MOST_PASSAGES} documents")
        with self.one_at_a_time:
            scores = self.rerank([(query, document) for document in documents])
        return {"result": sorted(({"index": i, "score": s} for i, s in enumerate(scores)), key=lambda r: -r["score"])}


def serve(setup: Setup, listening: socket.socket, token: str | None) -> None:
    """Serves the retriever of a setup, and its reranker, until it is interrupted."""
    settings = setup.settings
    rerank = setup.reranker.scores if settings.rerank else None
    service = Service(build_retriever(setup), rerank, settings.top_k, token)
    server = Server(service, *listening.getsockname()[:2], listening)
    print(f"serving     {url_of(listening)}/retrieve, {settings.top_k} documents per query (--top-k)", flush=True)
    with server:
        server.serve_forever()


def _entry(document: Document, with_score: bool) -> dict:
    made = document.to_json()
    made |= {"contents": f'"{document.title}"\n{document.text}', "source": document.source}
    return {"document": made, "score": document.score} if with_score else made
