"""Hybrid retrieval: the lists of the semantic and the lexical retriever, fused into one."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from r3lite.core.episode import Document, Question, Retrieve
from r3lite.retrieval.lexical import Lexical
from r3lite.retrieval.search import Search
from r3lite.retrieval.setup import Setup

DEPTH = 100  # passages of each list that are fused
RRF_K = 60


def build(setup: Setup, top_k: int) -> Retrieve:
    depth, settings = max(DEPTH, top_k), setup.settings
    semantic = Search(setup.index, depth, setup.own)
    lexical = Search(Lexical(setup.index.documents), depth, setup.own)
    if settings.fusion == "rrf":
        return Hybrid(semantic, lexical, top_k, reciprocal_ranks, (1.0, 1.0))
    return Hybrid(semantic, lexical, top_k, scaled_scores, (1 - settings.lexical_weight, settings.lexical_weight))


@dataclass(frozen=True)
class Hybrid:
    """Both retrievers' documents, ordered by the weighted sums of what `worth` makes of each list."""

    semantic: Retrieve
    lexical: Retrieve
    top_k: int
    worth: Callable[[list[Document]], list[float]]
    weights: tuple[float, float]

    def __call__(self, pairs: list[tuple[Question, str]]) -> list[list[Document]]:
        return [self._fused(lists) for lists in zip(self.semantic(pairs), self.lexical(pairs), strict=True)]

    def _fused(self, lists: tuple[list[Document], ...]) -> list[Document]:
        """One list of two. Of equal sums the first of the first list comes first: the same always."""
        sums: dict[Document, float] = {}
        sources: dict[Document, list[str]] = {}
        for documents, weight in zip(lists, self.weights, strict=True):
            for document, value in zip(documents, self.worth(documents), strict=True):
                sums[document] = sums.get(document, 0.0) + weight * value
                sources.setdefault(document, []).append(document.source)
        order = sorted(sums, key=lambda document: -sums[document])[: self.top_k]
        return [replace(d, score=sums[d], source="+".join(sources[d])) for d in order]


def reciprocal_ranks(documents: list[Document]) -> list[float]:
    """1 / (60 + rank), ranks from 1 (Cormack et al., SIGIR 2009)."""
    return [1 / (RRF_K + rank) for rank in range(1, len(documents) + 1)]


def scaled_scores(documents: list[Document]) -> list[float]:
    """The scores moved and stretched to go from 0 to 1, as cosines and BM25's sums are of different sizes.

    1 for all if they are equal. A document that a list lacks counts 0 there, as its last one does.
    """
    low, high = (min(scores), max(scores)) if (scores := [d.score for d in documents]) else (0.0, 0.0)
    return [(score - low) / (high - low) if high > low else 1.0 for score in scores]
