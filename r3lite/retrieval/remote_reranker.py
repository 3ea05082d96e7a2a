"""A reranker on another machine: the cross-encoder of a server of ours (server.py), read with distrust."""

from r3lite.core.errors import R3LiteError
from r3lite.core.records import InvalidRecord, Record, Source, parse
from r3lite.retrieval.posting import Poster

BATCH = 64  # passages of a request
REMEDY = "See that the server runs with --rerank and that --rerank here names its /rerank, or leave it out."


class RemoteReranker:
    """The cross-encoder at an address; it is asked once, so that a wrong one shows at once."""

    def __init__(self, address: str):
        self.address, self._poster = address, Poster(address, REMEDY)
        self.scores([("r3lite", "r3lite")])

    def scores(self, pairs: list[tuple[str, str]]) -> list[float]:
        """The score of each pair of query and passage. Raises R3LiteError if the server does not give them."""
        groups: dict[str, list[int]] = {}
        for place, (query, _) in enumerate(pairs):
            groups.setdefault(query, []).append(place)
        scores = [0.0] * len(pairs)
        for query, places in groups.items():
            for start in range(0, len(places), BATCH):
                batch = places[start : start + BATCH]
                for place, score in zip(batch, self._scores(query, [pairs[i][1] for i in batch]), strict=True):
                    scores[place] = score
        return scores

    def _scores(self, query: str, passages: list[str]) -> list[float]:
        body = self._poster.post({"query": query, "documents": passages})
        try:
            rows = Record(parse(body), Source(f"the reply of {self.address}")).records("result")
            found = {row.whole("index", high=len(passages) - 1): row.number("score") for row in rows}
            if len(found) != len(passages):
                raise InvalidRecord(f"{len(found)} scores for {len(passages)} passages")
            return [found[i] for i in range(len(passages))]
        except InvalidRecord as error:
            raise R3LiteError(f"{self.address} does not reply as a reranker: {error.cause}", REMEDY) from error
