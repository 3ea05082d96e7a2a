"""Hybrid retrieval: the lists of the semantic and the lexical retriever, fused into one."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from r3lite.core.episode import Document, Question, Retrieve
from r3lite.retrieval.lexical import Lexical
from r3lite.retrieval.search import RankingRetriever
from r3lite.retrieval.setup import Setup

DEPTH = 100  # how many passages of each list are fused, unless --top-k is larger
RRF_K = 60  # of reciprocal rank fusion


def hybrid_retriever(setup: Setup, top_k: int) -> Retrieve:
    """Returns the retriever that fuses the lists of the semantic and the lexical retriever."""
    settings = setup.settings
    depth = max(DEPTH, top_k)
    semantic = RankingRetriever(setup.index, depth, setup.findable_places)
    lexical = RankingRetriever(Lexical(setup.index.documents), depth, setup.findable_places)
    values_of = scaled_scores
    weights = (1 - settings.lexical_weight, settings.lexical_weight)
    if settings.fusion == "rrf":
        values_of = reciprocal_ranks
        weights = (1.0, 1.0)
    return HybridRetriever(semantic, lexical, top_k=top_k, values_of=values_of, weights=weights)


@dataclass(frozen=True)
class HybridRetriever:
    """Orders the documents of both retrievers by a sum over the two lists.

    The terms are a document's value in a list, times the list's weight.
    """

    semantic: Retrieve
    lexical: Retrieve
    top_k: int
    values_of: Callable[[list[Document]], list[float]]  # the value of each document of a list
    weights: tuple[float, float]  # of the semantic and the lexical list

    def __call__(self, pairs: list[tuple[Question, str]]) -> list[list[Document]]:
        semantic_lists = self.semantic(pairs)
        lexical_lists = self.lexical(pairs)
        return [self._fused(lists) for lists in zip(semantic_lists, lexical_lists, strict=True)]

    def _fused(self, lists: tuple[list[Document], ...]) -> list[Document]:
        """Returns the `top_k` documents with the largest sums.

        Documents of equal sums are in the order of the first list, then of the second.
        """
        sums: dict[Document, float] = {}
        sources: dict[Document, list[str]] = {}
        for documents, weight in zip(lists, self.weights, strict=True):
            for document, value in zip(documents, self.values_of(documents), strict=True):
                sums[document] = sums.get(document, 0.0) + weight * value
                sources.setdefault(document, []).append(document.source)
        ranking = sorted(sums, key=lambda document: -sums[document])[: self.top_k]
        fused = []
        for document in ranking:
            source = "+".join(sources[document])
            fused.append(replace(document, score=sums[document], source=source))
        return fused


def reciprocal_ranks(documents: list[Document]) -> list[float]:
    """Returns 1 / (60 + rank) for each document, ranks from 1 (Cormack et al., SIGIR 2009)."""
    return [1 / (RRF_K + rank) for rank in range(1, len(documents) + 1)]


def scaled_scores(documents: list[Document]) -> list[float]:
    """Returns the scores, shifted and scaled to 0 to 1: cosines and BM25's sums could not be added as they are.

    The lowest score becomes 0, and so counts like a document that is not in the list. If all are equal, all become 1.
    """
    if not documents:
        return []
    scores = [document.score for document in documents]
    low = min(scores)
    high = max(scores)
    if low == high:
        return [1.0] * len(scores)
    return [(score - low) / (high - low) for score in scores]
