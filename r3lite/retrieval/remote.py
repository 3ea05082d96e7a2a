"""Retrieval and reranking on other machines: servers that speak HTTP as Search-R1's and ours do (server.py).

Servers are not trusted: the time of a request and the size of a reply are limited, and the content of replies is
checked. If a failure may be transient, the request is tried again.
"""

import hashlib
import itertools
from time import sleep
from typing import Any

from r3lite.core.episode import Document, Retrieve, metadata_of
from r3lite.core.listening import RETRIEVER_TOKEN, bearer
from r3lite.core.records import InvalidRecord, Record, Source
from r3lite.llm.http_client import Link, Unanswered
from r3lite.retrieval.search import RankingRetriever

TIMEOUT = 60.0  # seconds of a request in all
TRIES = 3
PAUSE = 0.5  # seconds before the second try, doubled before the next
OUTLASTING = 8  # tries, over a minute, if the server has answered before: it may be restarting
LONGEST_PAUSE = 60.0  # seconds that a server may ask for
LARGEST = 32 << 20  # bytes of a reply
BATCH = 64  # the most queries of a request, or passages of a request to rerank


class Poster(Link):
    """Posts JSON to one address, and tries again if that may help: for about a minute if the server answered before."""

    def __init__(self, address: str, remedy: str, headers: dict[str, str] | None = None):
        super().__init__(address, remedy, seconds=TIMEOUT, max_bytes=LARGEST, headers=headers)
        self._tries = TRIES

    def text(self, path: str = "", content: dict | bytes | None = None) -> str:
        """Returns the body of the reply. Raises Unanswered if the last try fails, or if another try would not help."""
        for number in itertools.count(1):
            try:
                text = super().text(path, content)
                self._tries = OUTLASTING
                return text
            except Unanswered as error:
                if not error.is_transient or number >= self._tries:
                    raise
                pause = PAUSE * 2 ** (number - 1)
                requested = min(error.pause, LONGEST_PAUSE)
                sleep(max(pause, requested))


def remote_retriever(setup: Any, top_k: int) -> Retrieve:  # a Setup, whose module imports this one
    """Returns the retriever at the address of the settings.

    The server is sent a query, so that a wrong address shows at once.
    """
    remote = Remote(setup.settings.retriever)
    remote.search(["r3lite"], 1)
    return RankingRetriever(remote, top_k)


class Remote:
    """A server's ranking of passages."""

    def __init__(self, address: str):
        advice = f"that --retriever ends in /retrieve, and {RETRIEVER_TOKEN} if it needs a token"
        remedy = f"Check that the server runs, {advice}."
        self.address = address
        self._poster = Poster(address, remedy, bearer(RETRIEVER_TOKEN))

    def search(self, queries: list[str], k: int) -> list[list[Document]]:
        """Returns the `k` best passages of each query. Raises R3LiteError if the server does not give them."""
        rankings = []
        for start in range(0, len(queries), BATCH):
            rankings += self._search(queries[start : start + BATCH], k)
        return rankings

    def _search(self, queries: list[str], k: int) -> list[list[Document]]:
        def read(reply: Record) -> list[list[Document]]:
            rows = reply.items("result")
            if len(rows) != len(queries):
                raise InvalidRecord(f"{len(rows)} lists for {len(queries)} queries", code="remote-list-count")
            rankings = []
            for row in rows:
                entries = _entries(row)[:k]
                rankings.append([_document(entry, self.address) for entry in entries])
            return rankings

        content = {"queries": queries, "topk": k, "return_scores": True}
        return self._poster.ask("", content, server="a retriever", read=read)


def _entries(row: object) -> list[Record]:
    return Record({"a row of result": row}, Source("")).records("a row of result")


def _document(entry: Record, address: str) -> Document:
    """Returns a document of a reply, with or without a score.

    An entry without `text` has it in `contents`, whose first line is the title if more lines follow.
    """
    inner = entry.record("document") if "document" in entry else entry
    title = inner.text("title", "", blank=True)
    text = inner.text("text", None, blank=True)
    if text is None:
        first_line, _, body = inner.text("contents", blank=True).partition("\n")
        if body:
            title = first_line.strip().strip('"')
            text = body
        else:
            text = first_line
    source = inner.text("source", None) or address
    id = inner.identifier("id", None)
    if not id:  # Search-R1's servers of web search send none: the same passage gets the same id
        id = hashlib.sha256(f"{title}\n{text}".encode()).hexdigest()[:16]
    return Document(
        id=id,
        title=title,
        text=text,
        score=entry.number("score", None),
        source=source,
        metadata=metadata_of(inner),
    )


class RemoteReranker:
    """The cross-encoder of one of our servers. The server is sent a pair, so that a wrong address shows at once."""

    def __init__(self, address: str):
        advice = f"that --rerank here ends in /rerank, and {RETRIEVER_TOKEN} if it needs a token"
        remedy = f"Check that the server runs with --rerank, {advice}."
        self._poster = Poster(address, remedy, bearer(RETRIEVER_TOKEN))
        self.scores([("r3lite", "r3lite")])

    def scores(self, pairs: list[tuple[str, str]]) -> list[float]:
        """Returns the score of each pair of query and passage. Raises R3LiteError if the server does not give them."""
        scores: list[float] = []
        # `groupby` joins the consecutive pairs of one query.
        for query, pairs_of_query in itertools.groupby(pairs, key=lambda pair: pair[0]):
            passages = [passage for _, passage in pairs_of_query]
            for start in range(0, len(passages), BATCH):
                scores += self._scores(query, passages[start : start + BATCH])
        return scores

    def _scores(self, query: str, passages: list[str]) -> list[float]:
        def read(reply: Record) -> list[float]:
            rows = reply.records("result")
            last = len(passages) - 1
            by_index = {row.whole("index", high=last): row.number("score") for row in rows}
            if len(by_index) != len(passages):
                raise InvalidRecord(f"{len(by_index)} scores for {len(passages)} passages", code="remote-score-count")
            return [by_index[i] for i in range(len(passages))]

        content = {"query": query, "documents": passages}
        return self._poster.ask("", content, server="a reranker", read=read)
