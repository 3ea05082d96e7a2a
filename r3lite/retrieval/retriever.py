"""The retrievers by name, each with a reranker if --rerank asks for one, and with failures that do not end a run.

A retriever is a function from pairs (question, query) to the documents of each query, best first.
"""

from collections.abc import Callable
from dataclasses import replace

from r3lite.core.episode import Document, Failure, Question, Retrieve, Routes
from r3lite.core.errors import R3LiteError
from r3lite.core.terminal import say
from r3lite.retrieval import golden, hybrid, lexical
from r3lite.retrieval.reranker import CANDIDATES, Reranked
from r3lite.retrieval.search import Search
from r3lite.retrieval.setup import Setup

GIVE_UP = 100  # failed queries in a row after which a run stops, because it learns nothing

# The retrievers of --retriever but those behind an address and web services: functions of the setup and of the number
# of documents per query.
RETRIEVERS: dict[str, Callable[[Setup, int], Retrieve]] = {
    "semantic": lambda setup, top_k: Search(setup.index, top_k, setup.own),
    "lexical": lexical.build,
    "hybrid": hybrid.build,
    "golden": golden.build,
    "none": lambda setup, top_k: lambda pairs: [[] for _ in pairs],
}


def build_retriever(setup: Setup) -> Retrieve:
    """The retriever of the settings, or several by kind of source. They run on the CPU."""
    settings = setup.settings
    own = settings.of_sources
    if settings.is_web:
        from r3lite.retrieval import web

        own = {name: settings for name in web.SERVICES[settings.retriever].kinds if name != setup.kind} | own
    default = _built(setup)
    if not own:
        return default
    return Routes(default, {k: _built(replace(setup, settings=s, kind=k, like=setup)) for k, s in own.items()})


def _built(setup: Setup) -> Retrieve:
    """The retriever of one kind of source."""
    settings = setup.settings
    if settings.is_web:
        from r3lite.retrieval.web import build
    elif settings.is_collection:
        from r3lite.retrieval.qdrant import build
    elif settings.is_remote:
        from r3lite.retrieval.remote import build
    else:
        build = RETRIEVERS[settings.retriever]
    if settings.rerank is None:
        return Tolerant(build(setup, settings.top_k), setup.gives_up)
    reranker = setup.reranker  # loaded before an index is built, so that an error shows at once
    return Tolerant(Reranked(build(setup, CANDIDATES * settings.top_k), reranker, settings.top_k), setup.gives_up)


class Tolerant:
    """A retriever that returns a `Failure` in place of the documents of a query that fails.

    If a batch fails, its queries are tried again one by one, so that each fails for its own reason only. Each reason is
    printed once. With `gives_up`, R3LiteError is raised after GIVE_UP failures in a row. Bugs of r3lite are not caught.
    """

    def __init__(self, retrieve: Retrieve, gives_up: bool = True):
        self.retrieve, self.gives_up = retrieve, gives_up
        self.reasons: set[str] = set()
        self.in_a_row = 0

    def __call__(self, pairs: list[tuple[Question, str]]) -> list[list[Document] | Failure]:
        try:
            found = self.retrieve(pairs)
        except (R3LiteError, OSError, RuntimeError, MemoryError) as error:  # RuntimeError: of PyTorch and FAISS
            if len(pairs) > 1:
                return [outcome for pair in pairs for outcome in self([pair])]
            return [self._failed(error.cause if isinstance(error, R3LiteError) else f"{type(error).__name__}: {error}")]
        self.in_a_row = 0
        return found

    def _failed(self, reason: str) -> Failure:
        self.in_a_row += 1
        if self.gives_up and self.in_a_row >= GIVE_UP:
            remedy = "Fix the cause, and run the same command again; continue a training run with --resume auto."
            raise R3LiteError(f"the retriever failed on {GIVE_UP} queries in a row: {reason}", remedy)
        if reason not in self.reasons:
            self.reasons.add(reason)
            say(f"warning: the retriever failed: {reason}")
        return Failure(reason)
