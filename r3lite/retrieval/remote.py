"""The remote retriever: what a server finds that speaks HTTP as Search-R1's does (server.py), read with distrust."""

import hashlib

from r3lite.core.episode import Document, Retrieve, metadata_of
from r3lite.core.records import InvalidRecord, Record, Source
from r3lite.retrieval.posting import Poster
from r3lite.retrieval.search import Search
from r3lite.retrieval.setup import Setup

BATCH = 64  # queries of a request
REMEDY = "See that the server runs and that --retriever names its /retrieve, or use another retriever."


def build(setup: Setup, top_k: int) -> Retrieve:
    """The retriever at the address of the settings; it is asked once, so that a wrong one shows at once."""
    remote = Remote(setup.settings.retriever)
    remote.search(["r3lite"], 1)
    return Search(remote, top_k)


class Remote:
    """A server's ranking of passages."""

    def __init__(self, address: str):
        self.address, self._poster = address, Poster(address, REMEDY, outlasts=True)

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

        return self._poster.ask({"queries": queries, "topk": k, "return_scores": True}, "a retriever", read)


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
    score = whole.number("score", None)
    return Document(id, title, text, score=score, source=source, metadata=metadata_of(inner))
