"""Retrieval and reranking on other machines: servers that speak HTTP as Search-R1's and ours do (server.py).

Servers are not trusted: requests end after a time, replies at a size, and what they hold is checked. Some failures are
tried again.
"""

import hashlib
import itertools
from time import sleep
from typing import Any

from r3lite.core.episode import Document, Retrieve, metadata_of
from r3lite.core.listening import RETRIEVER_TOKEN, bearer
from r3lite.core.records import InvalidRecord, Record, Source
from r3lite.llm.http_client import Link, Unanswered
from r3lite.retrieval.search import Search

TIMEOUT = 60.0  # seconds of a request in all
TRIES, PAUSE = 3, 0.5  # seconds before the second try, doubled before the next
OUTLASTING = 8  # tries, over a minute, of a server that has answered before: it may be starting again
LONGEST_PAUSE = 60.0  # seconds that a server may ask for
LARGEST = 32 << 20  # bytes of a reply
BATCH = 64  # queries of a request, or passages of one query


class Poster(Link):
    """Posts JSON to one address, and tries again if that may help. One that has answered may be away for a minute."""

    def __init__(self, address: str, remedy: str, headers: dict[str, str] | None = None):
        super().__init__(address, remedy, TIMEOUT, LARGEST, headers)
        self._tries = TRIES

    def text(self, path: str = "", content: dict | bytes | None = None) -> str:
        """The body of the reply, after some tries. Raises Unanswered."""
        for number in itertools.count(1):
            try:
                text = super().text(path, content)
                self._tries = OUTLASTING
                return text
            except Unanswered as error:
                if not error.passes or number >= self._tries:
                    raise
                sleep(max(PAUSE * 2 ** (number - 1), min(error.pause, LONGEST_PAUSE)))


def build(setup: Any, top_k: int) -> Retrieve:  # a Setup, whose file imports this one
    """The retriever at the address of the settings; it is asked once, so that a wrong one shows at once."""
    remote = Remote(setup.settings.retriever)
    remote.search(["r3lite"], 1)
    return Search(remote, top_k)


class Remote:
    """A server's ranking of passages."""

    def __init__(self, address: str):
        ours = f"that --retriever ends in /retrieve, and {RETRIEVER_TOKEN} if it needs a token"
        remedy = f"Check that the server runs, {ours}."
        self.address, self._poster = address, Poster(address, remedy, bearer(RETRIEVER_TOKEN))

    def search(self, queries: list[str], k: int) -> list[list[Document]]:
        """The `k` best passages of each query. Raises R3LiteError if the server does not give them."""
        batches = (queries[start : start + BATCH] for start in range(0, len(queries), BATCH))
        return [documents for batch in batches for documents in self._search(batch, k)]

    def _search(self, queries: list[str], k: int) -> list[list[Document]]:
        def read(reply: Record) -> list[list[Document]]:
            rows = reply.items("result")
            if len(rows) != len(queries):
                raise InvalidRecord(f"{len(rows)} lists for {len(queries)} queries")
            return [[_document(entry, self.address) for entry in _entries(row)[:k]] for row in rows]

        return self._poster.ask("", {"queries": queries, "topk": k, "return_scores": True}, "a retriever", read)


def _entries(row: object) -> list[Record]:
    return Record({"a row of result": row}, Source("")).records("a row of result")


def _document(whole: Record, address: str) -> Document:
    """A document of a reply, with or without a score; without a title and a text of its own, those of `contents`."""
    inner = whole.record("document") if "document" in whole else whole
    title, text = inner.text("title", "", blank=True), inner.text("text", None, blank=True)
    if text is None:
        first, _, rest = inner.text("contents", blank=True).partition("\n")
        title, text = (first.strip().strip('"'), rest) if rest else (title, first)
    source = inner.text("source", None) or address
    # Search-R1's servers of web search give no ids: the same text has the same one.
    id = inner.identifier("id", None) or hashlib.sha256(f"{title}\n{text}".encode()).hexdigest()[:16]
    return Document(id, title, text, whole.number("score", None), source, metadata_of(inner))


class RemoteReranker:
    """The cross-encoder of a server of ours; it is asked once, so that a wrong address shows at once."""

    def __init__(self, address: str):
        ours = f"that --rerank here ends in /rerank, and {RETRIEVER_TOKEN} if it needs a token"
        remedy = f"Check that the server runs with --rerank, {ours}."
        self._poster = Poster(address, remedy, bearer(RETRIEVER_TOKEN))
        self.scores([("r3lite", "r3lite")])

    def scores(self, pairs: list[tuple[str, str]]) -> list[float]:
        """The score of each pair of query and passage. Raises R3LiteError if the server does not give them."""
        scores: list[float] = []
        for query, same in itertools.groupby(pairs, key=lambda pair: pair[0]):
            while batch := [passage for _, passage in itertools.islice(same, BATCH)]:
                scores += self._scores(query, batch)
        return scores

    def _scores(self, query: str, passages: list[str]) -> list[float]:
        def read(reply: Record) -> list[float]:
            rows = reply.records("result")
            found = {row.whole("index", high=len(passages) - 1): row.number("score") for row in rows}
            if len(found) != len(passages):
                raise InvalidRecord(f"{len(found)} scores for {len(passages)} passages")
            return [found[i] for i in range(len(passages))]

        return self._poster.ask("", {"query": query, "documents": passages}, "a reranker", read)
