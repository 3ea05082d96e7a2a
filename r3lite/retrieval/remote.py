"""The remote retriever: what a server finds that speaks HTTP as Search-R1's does (server.py), read with distrust."""

import time
from collections.abc import Callable

import httpx2

from r3lite.episode import Document, Retrieve
from r3lite.errors import R3LiteError
from r3lite.records import InvalidRecord, Record, Source, parse
from r3lite.retrieval.search import Search
from r3lite.retrieval.setup import Setup

TIMEOUT = 60.0  # seconds of a request in all
TRIES, PAUSE = 3, 0.5  # seconds before the second try, doubled before the next
BATCH = 64  # queries of a request
LARGEST = 32 << 20  # bytes of a reply
PASSING = (408, 429, 500, 502, 503, 504)  # statuses after which the next try may succeed
REMEDY = "See that the server runs and that --retriever names its /retrieve, or use another retriever."


def build(setup: Setup, top_k: int) -> Retrieve:
    """The retriever at the address of the settings; it is asked once, so that a wrong one shows at once."""
    remote = Remote(setup.settings.retriever)
    remote.search(["r3lite"], 1)
    return Search(remote, top_k, lambda questions: None)


class Remote:
    """A server's ranking of passages."""

    def __init__(self, address: str, sleep: Callable[[float], None] = time.sleep):
        self.address, self._sleep = address, sleep
        # Without compression, of which a few bytes may unpack to any size.
        self._client = httpx2.Client(timeout=TIMEOUT, headers={"accept-encoding": "identity"})

    def search(self, queries: list[str], k: int, own: None = None) -> list[list[Document]]:
        """The `k` best passages of each query. Raises R3LiteError if the server does not give them."""
        assert own is None, "a server knows nothing of a question's own paragraphs"
        batches = (queries[start : start + BATCH] for start in range(0, len(queries), BATCH))
        return [documents for batch in batches for documents in self._search(batch, k)]

    def _search(self, queries: list[str], k: int) -> list[list[Document]]:
        body = self._post({"queries": queries, "topk": k, "return_scores": True})
        try:
            rows = Record(parse(body), Source(f"the reply of {self.address}")).items("result")
            if len(rows) != len(queries):
                raise InvalidRecord(f"{len(rows)} lists for {len(queries)} queries")
            return [[_document(entry, self.address) for entry in _objects(row)[:k]] for row in rows]
        except InvalidRecord as error:
            raise R3LiteError(f"{self.address} does not reply as a retriever: {error.cause}", REMEDY) from error

    def _post(self, body: dict) -> str:
        """The body of the reply, after some tries."""
        for left in reversed(range(TRIES)):
            try:
                return self._try(body)
            except _Passing as error:
                if not left:
                    raise R3LiteError(f"{self.address} gives no documents: {error}", REMEDY) from error
                self._sleep(PAUSE * 2 ** (TRIES - 1 - left))
        raise AssertionError("the last try returns or raises")

    def _try(self, body: dict) -> str:
        began, found = time.monotonic(), bytearray()
        try:
            with self._client.stream("POST", self.address, json=body) as reply:
                for chunk in reply.iter_raw():
                    found += chunk
                    if len(found) > LARGEST:
                        raise R3LiteError(f"{self.address} sends more than {LARGEST >> 20} MiB", REMEDY)
                    if time.monotonic() - began > TIMEOUT:
                        raise _Passing(f"no reply within {TIMEOUT:g} s")
                text = found.decode(errors="replace")
                if reply.status_code in PASSING:
                    raise _Passing(f"status {reply.status_code}: {_short(text)}")
                if reply.status_code != 200:
                    told = f"{self.address} refuses: status {reply.status_code}: {_short(text)}"
                    raise R3LiteError(told, REMEDY)
                return text
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise _Passing(f"{type(error).__name__}: {error}") from error


class _Passing(Exception):
    """What the next try may not meet."""


def _short(text: str) -> str:
    return " ".join(text.split())[:200]


def _objects(row: object) -> list[dict]:
    if not isinstance(row, list) or not all(isinstance(entry, dict) for entry in row):
        raise InvalidRecord("result holds something else than lists of objects")
    return row


def _document(entry: dict, address: str) -> Document:
    """A document of a reply, with or without a score; without a title and a text of its own, those of `contents`."""
    whole = Record(entry, Source(""))
    inner = whole.record("document") if "document" in whole else whole
    title, text = inner.text("title", None, blank=True), inner.text("text", None, blank=True)
    if text is None:
        first, _, rest = inner.text("contents", blank=True).partition("\n")
        title, text = (first.strip().strip('"'), rest) if rest else (title or "", first)
    source = inner.text("source", None) or address
    return Document(inner.identifier("id"), title or "", text, score=whole.number("score", None), source=source)
