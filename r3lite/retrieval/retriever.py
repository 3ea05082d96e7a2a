"""The retrievers by name, each with a reranker if --rerank asks for one, and with failures that do not end a run.

A retriever is a function from pairs (question, query) to the documents of each query, best first.
"""

from collections.abc import Callable
from dataclasses import replace

from r3lite.core.episode import Document, Failure, Question, Retrieve, Routes
from r3lite.core.errors import R3LiteError
from r3lite.core.terminal import say
from r3lite.retrieval.golden import golden_retriever
from r3lite.retrieval.hybrid import hybrid_retriever
from r3lite.retrieval.lexical import lexical_retriever
from r3lite.retrieval.reranker import CANDIDATES, Reranked
from r3lite.retrieval.search import RankingRetriever
from r3lite.retrieval.setup import Setup

GIVE_UP = 100  # failed queries in a row after which a run stops, because it learns nothing


def retrieve_nothing(pairs: list[tuple[Question, str]]) -> list[list[Document]]:
    """The retriever of `--retriever none`."""
    return [[] for _ in pairs]


# Functions that build a retriever from the setup and the number of documents per query, by the value of --retriever.
# `own_places` confines a search to the paragraphs that came with its question, if the settings say so.
# Web services and URLs (of a retrieval server or a Qdrant collection) have no entry: `_build_one` imports their
# builders.
RETRIEVERS: dict[str, Callable[[Setup, int], Retrieve]] = {
    "semantic": lambda setup, top_k: RankingRetriever(setup.index, top_k, setup.own_places),
    "lexical": lexical_retriever,
    "hybrid": hybrid_retriever,
    "golden": golden_retriever,
    "none": lambda setup, top_k: retrieve_nothing,
}


def build_retriever(setup: Setup) -> Retrieve:
    """Returns the retriever of the settings; with several kinds of source (web, news, ...), a retriever for each kind.

    They run on the CPU.
    """
    settings = setup.settings
    settings_by_kind = settings.of_sources  # those of --source-index, by kind of source
    if settings.is_web:
        from r3lite.retrieval import web

        kinds = web.SERVICES[settings.retriever].kinds
        # The default retriever searches one kind of the service's sources, `setup.kind`. The other kinds have the same
        # settings, except those that --source-index names.
        of_service = {kind: settings for kind in kinds if kind != setup.kind}
        settings_by_kind = of_service | settings_by_kind
    default_retriever = _build_one(setup)
    if not settings_by_kind:
        return default_retriever
    by_kind = {}
    for kind, settings_of_kind in settings_by_kind.items():
        # All kinds share the reranker, the encoder and the query cache of the default retriever's setup.
        by_kind[kind] = _build_one(replace(setup, settings=settings_of_kind, kind=kind, default=setup))
    return Routes(default_retriever, by_kind)


def _build_one(setup: Setup) -> Retrieve:
    """Returns the retriever of one kind of source."""
    settings = setup.settings
    if settings.is_web:
        from r3lite.retrieval.web import web_retriever as build
    elif settings.is_collection:
        from r3lite.retrieval.qdrant import qdrant_retriever as build
    elif settings.is_remote:
        from r3lite.retrieval.remote import remote_retriever as build
    else:
        build = RETRIEVERS[settings.retriever]
    if settings.rerank is None:
        return Tolerant(build(setup, settings.top_k), setup.gives_up)
    reranker = setup.reranker  # this property loads the model: before an index is built, so that an error shows early
    candidates = build(setup, CANDIDATES * settings.top_k)
    return Tolerant(Reranked(candidates, reranker, settings.top_k), setup.gives_up)


class Tolerant:
    """A retriever that returns a `Failure` in place of the documents of a query that fails.

    If a batch fails, its queries are tried again one by one, so that one query does not make others fail. Each reason
    is printed once. With `gives_up`, R3LiteError is raised after GIVE_UP failures in a row. Other errors, such
    as a KeyError, are bugs of r3lite and are not caught.
    """

    def __init__(self, retrieve: Retrieve, gives_up: bool = True):
        self.retrieve = retrieve
        self.gives_up = gives_up
        self.reasons: set[str] = set()
        self.failures_in_a_row = 0

    def __call__(self, pairs: list[tuple[Question, str]]) -> list[list[Document] | Failure]:
        try:
            documents = self.retrieve(pairs)
        except (R3LiteError, OSError, RuntimeError, MemoryError) as error:  # RuntimeError: of PyTorch and FAISS
            if len(pairs) > 1:
                return [outcome for pair in pairs for outcome in self([pair])]
            if isinstance(error, R3LiteError):
                return [self._failure(error.cause)]
            return [self._failure(f"{type(error).__name__}: {error}")]
        self.failures_in_a_row = 0
        return documents

    def _failure(self, reason: str) -> Failure:
        """Counts a failed query and prints its reason, once. Raises R3LiteError after GIVE_UP in a row."""
        self.failures_in_a_row += 1
        if self.gives_up and self.failures_in_a_row >= GIVE_UP:
            remedy = "Fix the cause, and run the same command again; continue a training run with --resume auto."
            raise R3LiteError(
                f"the retriever failed on {GIVE_UP} queries in a row: {reason}", remedy, code="retriever-failed"
            )
        if reason not in self.reasons:
            self.reasons.add(reason)
            say(f"warning: the retriever failed: {reason}")
        return Failure(reason)
