"""Lexical retrieval: BM25 over English stems, by the package bm25s.

It finds names that an encoder has never seen, and needs no model. 100,000 passages take 10 seconds on one core to
index, so nothing is kept on disk.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
from tqdm import tqdm

from r3lite.core.bars import BRIEF
from r3lite.core.episode import Document, Retrieve
from r3lite.core.errors import R3LiteError, extra
from r3lite.retrieval.conventions import composed, passage_text
from r3lite.retrieval.search import RankingRetriever, best, with_scores
from r3lite.retrieval.setup import Setup

# A word may be one character long, as in "Apollo 9" and "vitamin K", but the s of "Apollo's" is no word. The default
# pattern of bm25s asks for two characters; with it, recall@5 on three development sets differs by less than .002
# (docs/retrieval.md).
WORD = r"(?u)\b\w\w+\b|(?<!['\u2019])\b\w\b"
BLOCK = 4096  # passages whose words are read between two updates of the progress bar


def lexical_retriever(setup: Setup, top_k: int) -> Retrieve:
    """Returns the retriever of the settings' passages by BM25."""
    return RankingRetriever(Lexical(setup.documents), top_k, setup.findable_places)


class Lexical:
    """Passages ranked by Lucene's variant of BM25 (k1 1.5, b 0.75); no stop words, other words stemmed by Snowball."""

    def __init__(self, documents: Sequence[Document]):
        with extra("retrieval", "lexical retrieval", "Or use --retriever semantic --encoder hashing."):
            import bm25s
            import Stemmer
        self.documents = documents
        self._tokenize = partial(
            bm25s.tokenize,
            token_pattern=WORD,
            stopwords="en",
            stemmer=Stemmer.Stemmer("english"),
            return_ids=False,
            show_progress=False,
        )
        words: list[list[str]] = []
        for start in tqdm(range(0, len(documents), BLOCK), "reading words", unit="block", **BRIEF):
            block = documents[start : start + BLOCK]
            words += self._words([passage_text(document) for document in block])
        if not any(words):
            raise R3LiteError(
                "no passage has a word for BM25", "Use another --corpus or --retriever.", code="corpus-without-words"
            )
        self.bm25 = bm25s.BM25(k1=1.5, b=0.75, method="lucene")
        self.bm25.index(words, show_progress=False)

    def _words(self, texts: list[str]) -> list[list[str]]:
        """Returns the stems of each text's words."""
        return self._tokenize([composed(text) for text in texts])

    def search(
        self,
        queries: list[str],
        k: int,
        own_places: list[tuple[int, ...]] | None = None,
    ) -> list[list[Document]]:
        """Returns the `k` best passages of each query, as `search.Ranking` says.

        A passage that shares no word with the query is left out, so there may be fewer than `k`, or none.
        """
        places_by_query = own_places or [None] * len(queries)
        rankings = []
        for words, places in zip(self._words(queries), places_by_query, strict=True):
            rankings.append(self._search(words, k, places))
        return rankings

    def _search(self, words: list[str], k: int, candidates: tuple[int, ...] | None) -> list[Document]:
        token_ids = self.bm25.get_tokens_ids(words)
        if not token_ids:
            return []
        scores = self.bm25.get_scores_from_ids(token_ids)  # [passages]
        if candidates is None:
            places = best(scores, k)
        else:
            order = best(scores[list(candidates)], k)
            places = np.array(candidates)[order]
        places = places[scores[places] > 0]
        return with_scores(self.documents, places, scores=scores[places], source="lexical")
