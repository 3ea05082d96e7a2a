"""Web search as a retriever: Exa and DuckDuckGo, whose answers are recorded, so that they can be had again.

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
from r3lite.retrieval.search import Search
from r3lite.retrieval.setup import Setup
from r3lite.settings.retrieval import SOURCES

AT_ONCE = 8  # requests under way
QUERY, TITLE, ADDRESS = 400, 200, 500  # characters at the most
PAGE = 4000  # characters of a page that are read
SENTENCE, PASSAGE = 64, 128  # tokens at the most, as `count_tokens` counts them
EXA, EXA_KEY = "https://api.exa.ai/search", "EXA_API_KEY"
KIND = SOURCES[0]  # of sources, for searches that name none


class Exa:
    """Searches by exa.ai, which needs a key."""

    kinds: ClassVar = {KIND: None, "News": "news", "Academic": "research paper"}  # by their `category`

    def __init__(self):
        if not (key := os.environ.get(EXA_KEY)):
            raise R3LiteError(f"--retriever exa needs a key in {EXA_KEY}", "Get one at exa.ai, or pass --web-replay.")
        self._poster = Poster(EXA, f"Check {EXA_KEY} and the connection to exa.ai.", {"x-api-key": key})

    def pages(self, query: str, kind: str, count: int) -> list[dict[str, str]]:
        """Pages with url, title and text, best first."""
        body = {"query": query, "numResults": count, "contents": {"text": {"maxCharacters": PAGE}}}
        body |= {"category": self.kinds[kind]} if self.kinds[kind] else {}

        def read(reply: Record) -> list[dict[str, str]]:
            return [_page(row, "url", "title", "text") for row in reply.records("results")[:count]]

        return self._poster.ask("", body, "documented", read)


class DuckDuckGo:
    """Searches by DuckDuckGo's pages for people, which the package ddgs reads; there is no service for programs."""

    kinds: ClassVar = {KIND: "text", "News": "news"}

    def __init__(self):
        with extra("web", "--retriever duckduckgo"):
            from ddgs import DDGS
        self._open = DDGS

    def pages(self, query: str, kind: str, count: int) -> list[dict[str, str]]:
        """Pages with url, title and text, which are a line or two, best first.

        Raises R3LiteError if there is none: to be refused for asking too often looks the same.
        """
        search = getattr(self._open(timeout=20), self.kinds[kind])
        # Exception: the package raises what its own libraries do.
        with explained(Exception, "DuckDuckGo returned no results", "Lower --web-rpm, or wait."):
            rows = search(query, max_results=count, backend="duckduckgo")
        names = ("href", "title", "body") if kind == KIND else ("url", "title", "body")
        return [_page(Record(row, Source("a result of DuckDuckGo")), *names) for row in rows]


SERVICES = {"exa": Exa, "duckduckgo": DuckDuckGo}


def _page(row: Record, url: str, title: str, text: str) -> dict[str, str]:
    """What is kept of a result; a service may leave out its title or text."""
    kept = {"url": (url, ADDRESS), "title": (title, TITLE), "text": (text, PAGE)}
    return {name: row.text(key, "", blank=True)[:most] for name, (key, most) in kept.items()}


class Recorded:
    """A service whose answers are kept in a folder, a file each, and are not asked for again.

    Several processes may share the folder.
    """

    def __init__(self, name: str, folder: Path, rpm: int, replay: bool):
        """With `replay`, nothing is ever sent, and a query that is not in the folder is an error."""
        self.name, self._cache = name, ReplyCache(folder, "--web-cache")
        self._limit = RateLimiter(rpm, time.monotonic, time.sleep)
        self._service = None if replay else SERVICES[name]()

    def pages(self, query: str, kind: str, count: int) -> list[dict[str, str]]:
        """The service's pages for a query, from the folder if they are there."""
        asked = {"service": self.name, "kind": kind, "query": query, "count": count}

        def read(record: Record) -> list[dict[str, str]]:
            rows = record.records("pages")
            return [{name: row.text(name, blank=True) for name in ("url", "title", "text")} for row in rows]

        if (found := self._cache.recall(digest(asked), read)) is not None:
            return found
        if self._service is None:
            remedy = "Remove --web-replay, or pass another --web-cache."
            raise R3LiteError(f"{self._cache.folder} has no result for this query ({kind})", remedy)
        self._limit.wait()
        found = self._service.pages(query, kind, count)
        self._cache.store(digest(asked), asked | {"pages": found})
        return found


@dataclass
class Web:
    """A service's pages as a ranking of passages, for one kind of source."""

    service: Recorded
    kind: str
    count: int  # pages that are asked for
    encoder: Encoder | None  # None: hashed words, weighed by the sentences of the query's own pages

    def search(self, queries: list[str], k: int) -> list[list[Document]]:
        """The `k` pages nearest to each query, by their nearest sentences."""
        asked = [" ".join(query.split())[:QUERY] for query in queries]
        with ThreadPoolExecutor(AT_ONCE) as threads:
            found = list(threads.map(lambda q: self.service.pages(q, self.kind, self.count) if q else [], asked))
        return [self._nearest(query, pages)[:k] for query, pages in zip(asked, found, strict=True)]

    def _nearest(self, query: str, pages: list[dict[str, str]]) -> list[Document]:
        """A passage of each page that has text, the nearest one first; of equal ones the service's order."""
        texts = [list(sentences(plain(page["text"]), SENTENCE)) for page in pages]
        said = [Document("", "", sentence) for of_page in texts for sentence in of_page]
        if not said:
            return []
        encoder = self.encoder or HashingEncoder.fit(document.text for document in said)
        scores = encoder.encode_passages(said, lambda n: None) @ encoder.encode_queries([query])[0]
        documents, start = [], 0
        for page, of_page in zip(pages, texts, strict=True):
            near, start = scores[start : start + len(of_page)], start + len(of_page)
            if of_page:
                found = page["url"], plain(page["title"]), best(of_page, near)
                documents.append(Document(*found, score=float(near.max()), source=self.service.name))
        return sorted(documents, key=lambda document: -document.score)


def best(texts: list[str], scores: np.ndarray) -> str:
    """The sentences of the highest scores, of PASSAGE tokens together or one that is longer, in the text's order."""
    chosen, size = [], 0
    for place in np.argsort(-scores, kind="stable").tolist():
        size += count_tokens(texts[place])
        if chosen and size > PASSAGE:
            break
        chosen.append(place)
    return " ".join(texts[place] for place in sorted(chosen))


def plain(text: str) -> str:
    """A text without soft hyphens and without characters that are not printed.

    It is no HTML: Exa returns Markdown, and ddgs takes tags and entities out. "<" and "&" stand for themselves.
    """
    return printable(without_soft_hyphens(text))


def build(setup: Setup, top_k: int) -> Retrieve:
    """The retriever of the service that the settings name."""
    settings = setup.settings
    service = Recorded(settings.retriever, Path(settings.web_cache), settings.web_rpm, settings.web_replay)
    kind = setup.kind if setup.kind in SERVICES[settings.retriever].kinds else KIND
    return Search(Web(service, kind, settings.web_results, setup.encoder), top_k)
