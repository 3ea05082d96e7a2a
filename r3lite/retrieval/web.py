"""Web search as a retriever: Exa and DuckDuckGo, whose answers are recorded, so that a run can be repeated.

A service gives up to --web-results pages for a query. The sentences of each that are nearest to the query become a
passage, and the nearest pages are the documents. What comes from the web is text of strangers: unprintable characters
are taken out and lengths are capped here; special tokens and the marks of a protocol are made harmless where documents
are laid out, as those of any corpus are.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from r3lite.core.episode import Document, Retrieve
from r3lite.core.errors import R3LiteError, explained, extra
from r3lite.core.records import Record, Source
from r3lite.core.terminal import printable
from r3lite.llm.cache import ReplyCache, digest
from r3lite.llm.limits import RateLimiter
from r3lite.retrieval.documents.chunks import count_tokens, sentences
from r3lite.retrieval.documents.section import without_soft_hyphens
from r3lite.retrieval.encoder import Encoder, HashingEncoder
from r3lite.retrieval.remote import Poster
from r3lite.retrieval.search import RankingRetriever
from r3lite.retrieval.setup import Setup
from r3lite.settings.retrieval import SOURCES

AT_ONCE = 8  # requests under way
# The most characters of a query, and of a page's title, address and text.
QUERY = 400
TITLE = 200
ADDRESS = 500
PAGE = 4000
# The most tokens of a sentence and of a passage, as `count_tokens` counts them.
SENTENCE = 64
PASSAGE = 128
EXA = "https://api.exa.ai/search"
EXA_KEY = "EXA_API_KEY"
KIND = SOURCES[0]  # the kind of sources for searches that name none


Page = dict[str, str]  # url, title and text


class Exa:
    """Searches by exa.ai, which needs a key."""

    kinds: ClassVar = {KIND: None, "News": "news", "Academic": "research paper"}  # Exa's `category` of each

    def __init__(self):
        key = os.environ.get(EXA_KEY)
        if not key:
            raise R3LiteError(
                f"--retriever exa needs a key in {EXA_KEY}",
                "Get one at exa.ai, or pass --web-replay.",
                code="exa-key-missing",
            )
        self._poster = Poster(EXA, f"Check {EXA_KEY} and the connection to exa.ai.", {"x-api-key": key})

    def pages(self, query: str, kind: str, count: int) -> list[Page]:
        """Returns pages with url, title and text, best first."""
        content = {"query": query, "numResults": count, "contents": {"text": {"maxCharacters": PAGE}}}
        if self.kinds[kind]:
            content["category"] = self.kinds[kind]

        def read(reply: Record) -> list[Page]:
            rows = reply.records("results")[:count]
            return [_page(row, url="url", title="title", text="text") for row in rows]

        return self._poster.ask("", content, server="documented", read=read)


class DuckDuckGo:
    """Searches by DuckDuckGo's web pages, which the package ddgs reads: DuckDuckGo has no such service for programs."""

    kinds: ClassVar = {KIND: "text", "News": "news"}  # the method of ddgs for each

    def __init__(self):
        with extra("web", "--retriever duckduckgo"):
            from ddgs import DDGS
        self._open = DDGS

    def pages(self, query: str, kind: str, count: int) -> list[Page]:
        """Returns pages with url, title and text, best first. A text is a line or two.

        Raises R3LiteError if there is no page: a service that refuses because it was asked too often looks the same.
        """
        search = getattr(self._open(timeout=20), self.kinds[kind])
        # Exception: the package raises what its own libraries do.
        with explained(
            Exception, "DuckDuckGo returned no results", "Lower --web-rpm, or wait.", code="web-search-failed"
        ):
            rows = search(query, max_results=count, backend="duckduckgo")
        source = Source("a result of DuckDuckGo")
        url = "href" if kind == KIND else "url"
        return [_page(Record(row, source), url=url, title="title", text="body") for row in rows]


SERVICES = {"exa": Exa, "duckduckgo": DuckDuckGo}


def _page(row: Record, url: str, title: str, text: str) -> Page:
    """Returns the page of a result with these keys; a field that the result lacks is empty."""
    return {
        "url": row.text(url, "", blank=True)[:ADDRESS],
        "title": row.text(title, "", blank=True)[:TITLE],
        "text": row.text(text, "", blank=True)[:PAGE],
    }


class Recorded:
    """A service whose answers are recorded in a folder, one file for each; a recorded query is not sent again.

    Several processes may share the folder.
    """

    def __init__(self, name: str, folder: Path, rpm: int, replay: bool):
        """Takes the folder of the records. With `replay`, nothing is ever sent, and a query without a record is an
        error."""
        self.name = name
        self._cache = ReplyCache(folder, "--web-cache")
        self._limit = RateLimiter(rpm, time.monotonic, time.sleep)
        self._service = None if replay else SERVICES[name]()

    def pages(self, query: str, kind: str, count: int) -> list[Page]:
        """Returns the service's pages for a query, from the folder if they are there."""
        request = {"service": self.name, "kind": kind, "query": query, "count": count}

        def read(record: Record) -> list[Page]:
            rows = record.records("pages")
            return [_recorded_page(row) for row in rows]

        pages = self._cache.recall(digest(request), read)
        if pages is not None:
            return pages
        if self._service is None:
            remedy = "Remove --web-replay, or pass another --web-cache."
            raise R3LiteError(
                f"{self._cache.folder} has no result for this query ({kind})", remedy, code="replay-absent"
            )
        self._limit.wait()
        pages = self._service.pages(query, kind, count)
        self._cache.store(digest(request), request | {"pages": pages})
        return pages


def _recorded_page(row: Record) -> Page:
    return {name: row.text(name, blank=True) for name in ("url", "title", "text")}


@dataclass
class Web:
    """A service's pages as a ranking of passages, for one kind of source."""

    service: Recorded
    kind: str
    count: int  # of pages for a query
    encoder: Encoder | None  # None: a hashing encoder that is fitted to the sentences of each query's pages

    def search(self, queries: list[str], k: int) -> list[list[Document]]:
        """Returns for each query a passage of each of the `k` nearest pages: those with the nearest sentences."""
        short_queries = [" ".join(query.split())[:QUERY] for query in queries]
        unique_queries = list(dict.fromkeys(short_queries))
        with ThreadPoolExecutor(AT_ONCE) as threads:
            pages_of = dict(zip(unique_queries, threads.map(self._pages, unique_queries), strict=True))
        return [self._nearest(query, pages_of[query])[:k] for query in short_queries]

    def _pages(self, query: str) -> list[Page]:
        if not query:
            return []
        return self.service.pages(query, self.kind, self.count)

    def _nearest(self, query: str, pages: list[Page]) -> list[Document]:
        """Returns a passage of each page that has text, the nearest first; equally near ones in the service's order."""
        texts = [plain(page["text"]) for page in pages]
        sentences_by_page = [list(sentences(text, SENTENCE)) for text in texts]
        all_sentences: list[str] = []
        for page_sentences in sentences_by_page:
            all_sentences += page_sentences
        if not all_sentences:
            return []
        encoder = self.encoder or HashingEncoder.fit(all_sentences)
        passages = [Document("", "", sentence) for sentence in all_sentences]
        passage_vectors = encoder.encode_passages(passages, lambda n: None)
        query_vector = encoder.encode_queries([query])[0]
        scores = passage_vectors @ query_vector  # [all sentences]
        documents = []
        start = 0
        for page, page_sentences in zip(pages, sentences_by_page, strict=True):
            if not page_sentences:
                continue
            page_scores = scores[start : start + len(page_sentences)]
            start += len(page_sentences)
            document = Document(
                id=page["url"],
                title=plain(page["title"]),
                text=best_sentences(page_sentences, page_scores),
                score=float(page_scores.max()),
                source=self.service.name,
            )
            documents.append(document)
        return sorted(documents, key=lambda document: -document.score)


def best_sentences(page_sentences: list[str], scores: np.ndarray) -> str:
    """Returns the sentences with the highest scores as a text, in the order of the page.

    They have at most PASSAGE tokens together, but there is at least one sentence, however long it is.
    """
    indices: list[int] = []
    size = 0
    for i in np.argsort(-scores, kind="stable").tolist():
        size += count_tokens(page_sentences[i])
        if indices and size > PASSAGE:
            break
        indices.append(i)
    return " ".join(page_sentences[i] for i in sorted(indices))


def plain(text: str) -> str:
    """Returns a text without soft hyphens and without characters that are not printed.

    The text is no HTML: Exa returns Markdown, and ddgs takes tags and entities out. "<" and "&" stand for themselves.
    """
    return printable(without_soft_hyphens(text))


def web_retriever(setup: Setup, top_k: int) -> Retrieve:
    """Returns the retriever of the service that the settings name."""
    settings = setup.settings
    service = Recorded(
        settings.retriever,
        folder=Path(settings.web_cache),
        rpm=settings.web_rpm,
        replay=settings.web_replay,
    )
    # A service that lacks this kind of sources searches those that it searches by default.
    kind = setup.kind if setup.kind in SERVICES[settings.retriever].kinds else KIND
    ranking = Web(service, kind=kind, count=settings.web_results, encoder=setup.encoder)
    return RankingRetriever(ranking, top_k)
