"""Builds the retriever of the settings: by its name, with a reranker if --rerank asks for one.

A retriever is a function from pairs (question, query) to the documents of each query, best first. A query that fails
gets a `Failure` instead of documents and does not end the run, unless GIVE_UP queries in a row fail.
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

GIVE_UP = 100  # failed queries in a row after which a run ends, because it would learn nothing


def retrieve_nothing(pairs: list[tuple[Question, str]]) -> list[list[Document]]:
    """The retriever of `--retriever none`: returns no documents for any query."""
    return [[] for _ in pairs]


# Functions that build a retriever from the setup and the number of documents per query, by the value of --retriever.
# Web services and URLs (of a retrieval server or a Qdrant collection) have no entry: `_build_one` imports the functions
# that build their retrievers.
RETRIEVERS: dict[str, Callable[[Setup, int], Retrieve]] = {
    # `findable_places` limits the searches of a question to its own paragraphs, with --context question. `lexical` and
    # `hybrid` read it from the setup themselves.
    "semantic": lambda setup, top_k: RankingRetriever(setup.index, top_k, setup.findable_places),
    "lexical": lexical_retriever,
    "hybrid": hybrid_retriever,
    "golden": golden_retriever,
    "none": lambda setup, top_k: retrieve_nothing,
}


def build_retriever(setup: Setup) -> Retrieve:
    """Returns the retriever of the settings. With several kinds of source (News, ...), each has its own retriever.

    Encoders and rerankers that are loaded here run on the CPU.
    """
    settings = setup.settings
    settings_by_kind = settings.by_kind  # for each kind of source that --source-index names
    if settings.is_web:
        from r3lite.retrieval import web

        kinds = web.SERVICES[settings.retriever].kinds
        # A web service has several kinds of source. The default retriever searches the kind `setup.kind`. Each other
        # kind gets a retriever with the same settings, or with those of --source-index if that names the kind.
        other_kinds = {kind: settings for kind in kinds if kind != setup.kind}
        settings_by_kind = other_kinds | settings_by_kind
    default_retriever = _build_one(setup)
    if not settings_by_kind:
        return default_retriever
    by_kind = {}
    for kind, settings_of_kind in settings_by_kind.items():
        # All kinds share the reranker, the encoder and the query cache of the default retriever's setup.
        by_kind[kind] = _build_one(replace(setup, settings=settings_of_kind, kind=kind, default=setup))
    return Routes(default_retriever, by_kind)


def _build_one(setup: Setup) -> Retrieve:
    """Returns the retriever of one kind of source, with its reranker."""
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
    # This property loads the reranker. Loaded before an index is built, it shows its errors early.
    reranker = setup.reranker
    retriever = build(setup, CANDIDATES * settings.top_k)
    return Tolerant(Reranked(retriever, reranker, settings.top_k), setup.gives_up)


class Tolerant:
    """A retriever that returns a `Failure` in place of the documents of a query that fails.

    If a batch fails, its queries are tried again one by one, so that one query does not make others fail. Each reason
    is printed once. With `gives_up`, R3LiteError is raised after GIVE_UP failed queries in a row. Errors of other
    types, such as a KeyError, are bugs of r3lite and are not caught.
    """

    def __init__(self, retrieve: Retrieve, gives_up: bool = True):
        self.retrieve = retrieve
        self.gives_up = gives_up
        self.reasons: set[str] = set()
        self.failures_in_a_row = 0

    def __call__(self, pairs: list[tuple[Question, str]]) -> list[list[Document] | Failure]:
        try:
            documents = self.retrieve(pairs)
        except (R3LiteError, OSError, RuntimeError, MemoryError) as error:  # PyTorch and FAISS raise RuntimeError
            if len(pairs) > 1:
                return [outcome for pair in pairs for outcome in self([pair])]
            if isinstance(error, R3LiteError):
                return [self._count_failure(error.cause)]
            return [self._count_failure(f"{type(error).__name__}: {error}")]
        self.failures_in_a_row = 0
        return documents

    def _count_failure(self, reason: str) -> Failure:
        """Counts a failed query, prints a reason that is new, and returns the `Failure`.

        With `gives_up`, raises R3LiteError after GIVE_UP failed queries in a row.
        """
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
