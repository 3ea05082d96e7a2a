"""What all retrievers that search have in common: passages are ranked by scores, equal queries are asked once."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from r3lite.core.episode import Document, Question


class Ranking(Protocol):
    """Passages that queries rank."""

    def search(self, queries: list[str], k: int, own: list[tuple[int, ...]] | None = None) -> list[list[Document]]:
        """The `k` best passages of each query, best first; of the places in `own[i]` only, for query i, if given."""


@dataclass(frozen=True)
class Search:
    """The retriever of a ranking: from pairs (question, query) to documents. All pairs of a call are one batch.

    `own_paragraphs` gives the places that the search of each question is confined to, or None; only for rankings whose
    passages have places here.
    """

    passages: Ranking
    top_k: int
    own_paragraphs: Callable[[list[Question]], list[tuple[int, ...]] | None] | None = None

    def __call__(self, pairs: list[tuple[Question, str]]) -> list[list[Document]]:
        own = self.own_paragraphs([question for question, _ in pairs]) if self.own_paragraphs else None
        keys = [(query, own[i] if own else None) for i, (_, query) in enumerate(pairs)]
        asked = list(dict.fromkeys(keys))
        confined = {"own": [places for _, places in asked]} if own else {}
        found = dict(zip(asked, self.passages.search([q for q, _ in asked], self.top_k, **confined), strict=True))
        return [list(found[key]) for key in keys]


def best(scores: np.ndarray, k: int) -> np.ndarray:
    """Places of the `k` highest of `scores` [N], highest first; of equal ones the first, so that it is the same always.

    Only those above the k-th are sorted: with 100,000 passages a whole sort takes longer than BM25 itself.
    """
    least = np.partition(scores, -k)[-k] if k < len(scores) else -np.inf
    candidates = np.flatnonzero(scores >= least)
    return candidates[np.argsort(-scores[candidates], kind="stable")][:k]


def found(documents: Sequence[Document], places: Iterable[int], scores: Iterable[float], source: str) -> list[Document]:
    """The documents at `places`, with their scores and the retriever that gave them."""
    return [replace(documents[i], score=float(s), source=source) for i, s in zip(places, scores, strict=True)]
