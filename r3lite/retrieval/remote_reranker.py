"""A reranker on another machine: the cross-encoder of a server of ours (server.py), read with distrust."""

import itertools

from r3lite.core.records import InvalidRecord, Record
from r3lite.retrieval.posting import Poster

BATCH = 64  # passages of a request
REMEDY = "See that the server runs with --rerank and that --rerank here names its /rerank, or leave it out."


class RemoteReranker:
    """The cross-encoder at an address; it is asked once, so that a wrong one shows at once."""

    def __init__(self, address: str):
        self.address, self._poster = address, Poster(address, REMEDY, outlasts=True)
        self.scores([("r3lite", "r3lite")])

    def scores(self, pairs: list[tuple[str, str]]) -> list[float]:
        """The score of each pair of query and passage. Raises R3LiteError if the server does not give them."""
        scores: list[float] = []
        for query, same in itertools.groupby(pairs, key=lambda pair: pair[0]):
            passages = [passage for _, passage in same]
            for start in range(0, len(passages), BATCH):
                scores += self._scores(query, passages[start : start + BATCH])
        return scores

    def _scores(self, query: str, passages: list[str]) -> list[float]:
        def read(reply: Record) -> list[float]:
            rows = reply.records("result")
            found = {row.whole("index", high=len(passages) - 1): row.number("score") for row in rows}
            if len(found) != len(passages):
                raise InvalidRecord(f"{len(found)} scores for {len(passages)} passages")
            return [found[i] for i in range(len(passages))]

        return self._poster.ask({"query": query, "documents": passages}, "a reranker", read)
