"""The part that retrievers of ranked passages share: equal queries of a batch are searched once."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from r3lite.core.episode import Document, Question

Places = tuple[int, ...]  # indices of passages


class Ranking(Protocol):
    """A set of passages that can be ranked for a query."""

    def search(
        self,
        queries: list[str],
        k: int,
        own_places: list[Places] | None = None,
    ) -> list[list[Document]]:
        """Returns the `k` best passages of each query, best first.

        With `own_places`, query i finds only the passages at the places `own_places[i]`.
        """


@dataclass(frozen=True)
class RankingRetriever:
    """The retriever of a ranking: from pairs (question, query) to documents. The pairs of a call are one batch."""

    passages: Ranking
    top_k: int
    # Returns for each question the indices of the passages that its searches may find. If it is None or returns None,
    # all passages may be found.
    findable_places: Callable[[list[Question]], list[Places] | None] | None = None

    def __call__(self, pairs: list[tuple[Question, str]]) -> list[list[Document]]:
        queries = [query for _, query in pairs]
        own_places = None
        if self.findable_places:
            own_places = self.findable_places([question for question, _ in pairs])
        if not own_places:
            unique_queries = list(dict.fromkeys(queries))
            rankings = self.passages.search(unique_queries, self.top_k)
            by_query = dict(zip(unique_queries, rankings, strict=True))
            return [list(by_query[query]) for query in queries]
        keys = list(zip(queries, own_places, strict=True))
        unique_keys = list(dict.fromkeys(keys))
        unique_queries = [query for query, _ in unique_keys]
        unique_places = [places for _, places in unique_keys]
        rankings = self.passages.search(unique_queries, self.top_k, own_places=unique_places)
        by_key = dict(zip(unique_keys, rankings, strict=True))
        return [list(by_key[key]) for key in keys]


def best(scores: np.ndarray, k: int) -> np.ndarray:
    """Returns the indices of the `k` highest `scores` [N], highest first; equal scores in order of their indices.

    Only candidates for the best k are sorted: with 100,000 passages a whole sort takes longer than BM25 itself.
    """
    threshold = -np.inf
    if k < len(scores):
        threshold = np.partition(scores, -k)[-k]
    candidates = np.flatnonzero(scores >= threshold)
    order = np.argsort(-scores[candidates], kind="stable")
    return candidates[order][:k]


def with_scores(
    documents: Sequence[Document],
    places: Iterable[int],
    scores: Iterable[float],
    source: str,
) -> list[Document]:
    """Returns the documents at the indices `places`, with their scores and the retriever's name."""
    scored = []
    for place, score in zip(places, scores, strict=True):
        scored.append(replace(documents[place], score=float(score), source=source))
    return scored
