"""What retrievers that rank passages share: equal queries of a batch are searched once, and the best k are kept."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from r3lite.core.episode import Document, Question


class Ranking(Protocol):
    """A set of passages that can be ranked for a query."""

    def search(self, queries: list[str], k: int, own: list[tuple[int, ...]] | None = None) -> list[list[Document]]:
        """The `k` best passages of each query, best first; for query i only among the indices `own[i]`, if given."""


@dataclass(frozen=True)
class Search:
    """The retriever of a ranking: from pairs (question, query) to documents. The pairs of a call are one batch."""

    passages: Ranking
    top_k: int
    # The indices of the passages that each question's searches are restricted to, or None for no restriction.
    own_paragraphs: Callable[[list[Question]], list[tuple[int, ...]] | None] | None = None

    def __call__(self, pairs: list[tuple[Question, str]]) -> list[list[Document]]:
        own = self.own_paragraphs([question for question, _ in pairs]) if self.own_paragraphs else None
        keys = [(query, own[i] if own else None) for i, (_, query) in enumerate(pairs)]
        asked = list(dict.fromkeys(keys))
        confined = {"own": [places for _, places in asked]} if own else {}
        found = dict(zip(asked, self.passages.search([q for q, _ in asked], self.top_k, **confined), strict=True))
        return [list(found[key]) for key in keys]


def best(scores: np.ndarray, k: int) -> np.ndarray:
    """Indices of the `k` highest `scores` [N], highest first; equal scores in order of their indices.

    Only candidates for the best k are sorted: with 100,000 passages a whole sort takes longer than BM25 itself.
    """
    least = np.partition(scores, -k)[-k] if k < len(scores) else -np.inf
    candidates = np.flatnonzero(scores >= least)
    return candidates[np.argsort(-scores[candidates], kind="stable")][:k]


def found(documents: Sequence[Document], places: Iterable[int], scores: Iterable[float], source: str) -> list[Document]:
    """The documents at the indices `places`, with their scores and the retriever's name."""
    return [replace(documents[i], score=float(s), source=source) for i, s in zip(places, scores, strict=True)]
