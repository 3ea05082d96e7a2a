"""A server of a retriever, for other machines: HTTP as Search-R1's servers speak it.

POST /retrieve takes {"queries": [...], "topk": k, "return_scores": true} and gives {"result": [[{"document": {...},
"score": s}, ...] per query]}. Without `return_scores`, each entry is the document itself. A document has `id` and
`contents`, whose first line is the title in quotes; this server adds `title`, `text`, `source` and, if there is any,
`metadata`. POST /rerank, if there is a reranker, takes {"query", "documents": [text, ...]} and gives
{"result": [{"index": i, "score": s}, ...]}, best first. The rest is in core/http_server.py.
"""

import socket
import threading
from collections.abc import Callable

from r3lite.core.episode import Document, Failure, Question, Retrieve
from r3lite.core.http_server import Peer, Server, UnknownPath
from r3lite.core.listening import url_of
from r3lite.core.records import WHOLE, InvalidRecord, Record
from r3lite.retrieval.retriever import build_retriever
from r3lite.retrieval.setup import Setup

MAX_QUERIES = 4096  # of a request
MAX_PASSAGES = 1000  # of a request to rerank


class RetrievalService:
    """Answers requests, one at a time, as each computes on all cores."""

    largest = 4 << 20  # bytes of a request
    raw = ()  # all requests are JSON

    def __init__(
        self,
        retrieve: Retrieve,
        rerank: Callable[[list[tuple[str, str]]], list[float]] | None,
        top_k: int,
        token: str | None = None,
    ):
        """`retrieve` gives `top_k` documents a query; `rerank` scores pairs of a query and a passage."""
        self.retrieve = retrieve
        self.rerank = rerank
        self.top_k = top_k
        self.token = token
        self.one_at_a_time = threading.Lock()

    def answer(self, path: str, request: Record | None, peer: Peer) -> dict:
        """Returns the reply to a request, as core.http_server.HttpService says. Raises OSError if retrieval fails."""
        if path == "/retrieve" and request:
            return self._retrieve(request, peer)
        if path == "/rerank" and request and self.rerank:
            return self._rank(request, peer)
        raise UnknownPath(path)

    def _retrieve(self, request: Record, peer: Peer) -> dict:
        queries = request.texts("queries")
        top_k = request.whole("topk", self.top_k, low=1, high=WHOLE)
        with_scores = request.flag("return_scores", False)
        if len(queries) > MAX_QUERIES or top_k > self.top_k:
            raise InvalidRecord(
                f"at most {MAX_QUERIES} queries and {self.top_k} documents per query (--top-k)",
                code="request-too-many-queries",
            )
        pairs = [(Question(str(i), query, ()), query) for i, query in enumerate(queries)]
        with peer.holding(self.one_at_a_time):
            outcomes = self.retrieve(pairs)
        for outcome in outcomes:
            if isinstance(outcome, Failure):
                raise OSError(outcome.reason)
        result = []
        for documents in outcomes:
            result.append([_entry(document, with_scores) for document in documents[:top_k]])
        return {"result": result}

    def _rank(self, request: Record, peer: Peer) -> dict:
        query = request.text("query")
        documents = request.texts("documents")
        if len(documents) > MAX_PASSAGES:
            raise InvalidRecord(f"at most {MAX_PASSAGES} documents", code="request-too-many-documents")
        with peer.holding(self.one_at_a_time):
            scores = self.rerank([(query, document) for document in documents])
        ranking = sorted(range(len(scores)), key=lambda i: -scores[i])
        return {"result": [{"index": i, "score": scores[i]} for i in ranking]}


def serve(setup: Setup, listening: socket.socket, token: str | None) -> None:
    """Serves the retriever of a setup, and its reranker, until it is interrupted."""
    settings = setup.settings
    service = RetrievalService(
        retrieve=build_retriever(setup),
        rerank=setup.reranker.scores if settings.rerank else None,
        top_k=settings.top_k,
        token=token,
    )
    host, port = listening.getsockname()[:2]
    server = Server(
        service,
        host=host,
        port=port,
        listening=listening,
    )
    print(f"serving     {url_of(listening)}/retrieve, {settings.top_k} documents per query (--top-k)", flush=True)
    with server:
        server.serve_forever()


def _entry(document: Document, with_score: bool) -> dict:
    """Returns a document as Search-R1's servers write it."""
    values = document.to_json()
    values["contents"] = f'"{document.title}"\n{document.text}'
    values["source"] = document.source
    if with_score:
        return {"document": values, "score": document.score}
    return values
