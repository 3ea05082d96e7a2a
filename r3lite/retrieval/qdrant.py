"""Fills and searches a collection of passages on a Qdrant server, for a corpus whose index outgrows one machine.

The server holds vectors and passages; queries are encoded here. Needs the extra `qdrant`.
"""

import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from urllib.parse import urlsplit

from tqdm import tqdm

from r3lite.core.episode import Document, Retrieve, metadata_of
from r3lite.core.errors import R3LiteError, explained, extra
from r3lite.core.listening import is_loopback
from r3lite.core.records import Record, Source
from r3lite.retrieval.encoder import Encoder
from r3lite.retrieval.search import RankingRetriever
from r3lite.retrieval.setup import Setup

KEY = "QDRANT_API_KEY"
TIMEOUT = 60  # seconds of a request
QUERIES = 64  # most queries of a request
PASSAGES = 256  # most passages of a request
# Qdrant's names of distances. For vectors of length 1 both give the same order; for others only Dot is right.
DISTANCES = ("Cosine", "Dot")
POINTS = uuid.UUID("6f3d5c0e-6c8c-5d0a-9f0e-7a3f1f0c2b11")  # the namespace of the points' ids
REMEDY = "Check that the server runs, and check its address, the collection and QDRANT_API_KEY."


def qdrant_retriever(setup: Setup, top_k: int) -> Retrieve:
    """Returns the retriever of the collection that the settings name."""
    collection = Collection(setup.settings.retriever, setup.encoder)
    collection.check()
    return RankingRetriever(collection, top_k)


class Collection:
    """A collection: points whose payload is a passage (`Document.to_json`) and whose vector is that of the encoder."""

    def __init__(self, address: str, encoder: Encoder):
        """Takes an `address` qdrant://host:port/collection, or qdrant+https://..."""
        with extra("qdrant", address):
            from qdrant_client import QdrantClient, models
        parts = urlsplit(address)
        host = parts.hostname
        self.address = address
        self.encoder = encoder
        self.models = models
        self.name = parts.path.strip("/")
        if not host or not self.name or "/" in self.name:
            raise R3LiteError(
                f"{address} is not the address of a collection",
                "Pass qdrant://host:6333/collection.",
                code="qdrant-address",
            )
        key = os.environ.get(KEY)
        encrypted = parts.scheme == "qdrant+https"
        if key and not encrypted and not is_loopback(host):
            raise R3LiteError(
                f"{KEY} would be sent to {host} unencrypted",
                f"Use qdrant+https://..., or unset {KEY}.",
                code="qdrant-unencrypted",
            )
        self.client = QdrantClient(
            host=f"[{host}]" if ":" in host else host,  # an IPv6 address
            port=parts.port or 6333,
            https=encrypted,
            api_key=key,
            timeout=TIMEOUT,
            check_compatibility=False,  # the check warns on stderr, and refuses nothing
        )

    def check(self) -> None:
        """Raises R3LiteError unless the collection's vectors may be compared with those of the encoder."""
        settings = self.encoder.settings
        with self._server_errors():
            config = self.client.get_collection(self.name).config
        vectors = config.params.vectors
        if isinstance(vectors, dict) or vectors is None:
            raise R3LiteError(
                f"{self.address} has named vectors",
                "Use a collection with a single unnamed vector.",
                code="qdrant-named-vectors",
            )
        is_dot = "similarity" in settings  # only encoders for dot products have this setting
        distances = DISTANCES[1:] if is_dot else DISTANCES
        if vectors.distance not in distances or vectors.size != self.encoder.dimension:
            content = f"vectors of {vectors.size} dimensions with {vectors.distance} distance"
            needed = f"{self.encoder.dimension} with {distances[0]}"
            cause = f"{self.address} has {content}, but {settings['encoder']} needs {needed}"
            raise R3LiteError(cause, "Pass the --encoder that it was filled with.", code="qdrant-vectors-differ")
        stored = (config.metadata or {}).get("r3lite")
        if stored is None:
            return
        keys = sorted((stored | settings).keys() - {"dtype"})  # queries may be encoded in another dtype
        differences = [f"{key} {stored.get(key)}" for key in keys if stored.get(key) != settings.get(key)]
        if differences:
            cause = f"{self.address} was filled with another encoder: {', '.join(differences)}"
            raise R3LiteError(cause, "Pass that --encoder.", code="qdrant-encoder-differs")

    def create(self) -> None:
        """Makes the collection if the server does not have it."""
        distance = self.models.Distance.COSINE
        if "similarity" in self.encoder.settings:
            distance = self.models.Distance.DOT
        vectors = self.models.VectorParams(size=self.encoder.dimension, distance=distance)
        with self._server_errors():
            if not self.client.collection_exists(self.name):
                self.client.create_collection(
                    self.name,
                    vectors_config=vectors,
                    metadata={"r3lite": self.encoder.settings},
                )

    def missing(self, passages: Iterable[Document]) -> list[Document]:
        """Returns the passages that the collection does not have, or has with another title or text."""
        by_id = {point_id(passage): passage for passage in passages}
        with self._server_errors():
            points = self.client.retrieve(self.name, list(by_id), with_payload=True)
        payloads = {str(point.id): point.payload for point in points}
        return [passage for id, passage in by_id.items() if payloads.get(id) != passage.to_json()]

    def write(self, passages: list[Document]) -> None:
        """Encodes passages and writes them with their vectors."""
        vectors = self.encoder.encode_passages(passages, lambda count: None).tolist()
        points = []
        for passage, vector in zip(passages, vectors, strict=True):
            point = self.models.PointStruct(
                id=point_id(passage),
                vector=vector,
                payload=passage.to_json(),
            )
            points.append(point)
        with self._server_errors():
            self.client.upsert(self.name, points, wait=True)

    def search(self, queries: list[str], k: int) -> list[list[Document]]:
        """Returns the `k` best passages of each query. Raises R3LiteError if the server does not give them."""
        vectors = self.encoder.encode_queries(queries).tolist()
        requests = [self.models.QueryRequest(query=vector, limit=k, with_payload=True) for vector in vectors]
        replies = []
        for start in range(0, len(requests), QUERIES):
            with self._server_errors():
                replies += self.client.query_batch_points(self.name, requests[start : start + QUERIES])
        return [[self._document(point) for point in reply.points] for reply in replies]

    def count(self) -> int:
        """Returns the number of passages in the collection."""
        with self._server_errors():
            return self.client.count(self.name, exact=True).count

    def _document(self, point) -> Document:
        source = Source(f"{self.address}, point {point.id}", "The payload of each point must have a text.")
        record = Record(point.payload or {}, source)
        return Document(
            title=record.text("title", "", blank=True),
            text=record.text("text", blank=True),
            id=record.identifier("id", str(point.id)),
            score=point.score,
            source=self.address,
            metadata=metadata_of(record),
        )

    @contextmanager
    def _server_errors(self) -> Iterator[None]:
        """Raises R3LiteError in place of the client's errors."""
        from qdrant_client.http.exceptions import ApiException

        errors = (ApiException, ValueError)  # ValueError: raised by the client's embedded server, which tests use
        with explained(errors, self.address, REMEDY, code="qdrant-failed"):
            yield


def point_id(passage: Document) -> str:
    """Returns the id of a passage's point: always the same, so that filling again overwrites and does not double."""
    return str(uuid.uuid5(POINTS, passage.id))


def fill(address: str, passages: Iterable[Document], encoder: Encoder) -> tuple[int, int]:
    """Writes passages with their vectors into a collection, which is made if the server does not have it.

    Returns how many passages were encoded now and how many the collection has. Passages that it has already are not
    encoded again, so that after a kill the same call goes on.
    """
    collection = Collection(address, encoder)
    collection.create()
    collection.check()
    encoded = 0
    remaining = iter(tqdm(passages, "passages", unit="", disable=None))
    while block := list(islice(remaining, PASSAGES)):
        new = collection.missing(block)
        if new:
            collection.write(new)
        encoded += len(new)
    return encoded, collection.count()
