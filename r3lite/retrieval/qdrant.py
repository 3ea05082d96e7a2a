"""Passages in a collection of a Qdrant server, for those whose index outgrows one machine: filled, and searched.

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
from r3lite.retrieval.search import Search
from r3lite.retrieval.setup import Setup

KEY = "QDRANT_API_KEY"
TIMEOUT = 60  # seconds of a request
QUERIES, PASSAGES = 64, 256  # of a request
DISTANCES = ("Cosine", "Dot")  # of vectors of length 1 these are the same; for others Dot alone is right
POINTS = uuid.UUID("6f3d5c0e-6c8c-5d0a-9f0e-7a3f1f0c2b11")  # the namespace of the points' ids
REMEDY = "Check that the server runs, and check its address, the collection and QDRANT_API_KEY."


def build(setup: Setup, top_k: int) -> Retrieve:
    """The retriever of the collection that the settings name."""
    collection = Collection(setup.settings.retriever, setup.encoder)
    collection.check()
    return Search(collection, top_k)


class Collection:
    """A collection: points whose payload is a passage (id, title, text) and whose vector the encoder has made."""

    def __init__(self, address: str, encoder: Encoder):
        """`address`: qdrant://host:port/collection, or qdrant+https://..."""
        with extra("qdrant", address):
            from qdrant_client import QdrantClient, models
        self.address, self.encoder, self.models, parts = address, encoder, models, urlsplit(address)
        self.name, host = parts.path.strip("/"), parts.hostname
        if not host or not self.name or "/" in self.name:
            raise R3LiteError(f"{address} is not the address of a collection", "Pass qdrant://host:6333/collection.")
        key, encrypted = os.environ.get(KEY), parts.scheme == "qdrant+https"
        if key and not encrypted and not is_loopback(host):
            raise R3LiteError(f"{KEY} would be sent to {host} unencrypted", f"Use qdrant+https://..., or unset {KEY}.")
        # A check of the server's version warns on stderr, and refuses nothing.
        given = {"api_key": key, "timeout": TIMEOUT, "check_compatibility": False}
        self.client = QdrantClient(host=host, port=parts.port or 6333, https=encrypted, **given)

    def check(self) -> None:
        """Raises R3LiteError unless its vectors may be compared with those of the encoder."""
        now = self.encoder.settings
        with self.explained():
            config = self.client.get_collection(self.name).config
        vectors, made = config.params.vectors, (config.metadata or {}).get("r3lite")
        if isinstance(vectors, dict) or vectors is None:
            raise R3LiteError(f"{self.address} has named vectors", "Use a collection with a single unnamed vector.")
        fitting = DISTANCES[1:] if "similarity" in now else DISTANCES
        if vectors.distance not in fitting or vectors.size != self.encoder.dimension:
            there = f"vectors of {vectors.size} dimensions with {vectors.distance} distance"
            needed = f"{self.encoder.dimension} with {fitting[0]}"
            cause = f"{self.address} has {there}, but {now['encoder']} needs {needed}"
            raise R3LiteError(cause, "Pass the --encoder that it was filled with.")
        if made is not None and (other := {k for k in made | now if made.get(k) != now.get(k)} - {"dtype"}):
            others = ", ".join(f"{k} {made.get(k)}" for k in sorted(other))
            raise R3LiteError(f"{self.address} was filled with another encoder: {others}", "Pass that --encoder.")

    def create(self) -> None:
        """Makes the collection if it is not there."""
        distance = self.models.Distance.COSINE
        if "similarity" in self.encoder.settings:
            distance = self.models.Distance.DOT
        size = self.models.VectorParams(size=self.encoder.dimension, distance=distance)
        made = {"vectors_config": size, "metadata": {"r3lite": self.encoder.settings}}
        with self.explained():
            if not self.client.collection_exists(self.name):
                self.client.create_collection(self.name, **made)

    def missing(self, passages: Iterable[Document]) -> list[Document]:
        """Those of the passages that it does not have, or has with another title or text."""
        wanted = {point_id(passage): passage for passage in passages}
        with self.explained():
            points = self.client.retrieve(self.name, list(wanted), with_payload=True)
        there = {str(point.id): point.payload for point in points}
        return [passage for id, passage in wanted.items() if there.get(id) != passage.to_json()]

    def write(self, passages: list[Document]) -> None:
        pairs = zip(passages, self.encoder.encode_passages(passages, lambda count: None).tolist(), strict=True)
        points = [self.models.PointStruct(id=point_id(p), vector=vector, payload=p.to_json()) for p, vector in pairs]
        with self.explained():
            self.client.upsert(self.name, points, wait=True)

    def search(self, queries: list[str], k: int) -> list[list[Document]]:
        """The `k` best passages of each query. Raises R3LiteError if the server does not give them."""
        found, vectors = [], self.encoder.encode_queries(queries).tolist()
        requests = [self.models.QueryRequest(query=vector, limit=k, with_payload=True) for vector in vectors]
        for start in range(0, len(requests), QUERIES):
            with self.explained():
                found += self.client.query_batch_points(self.name, requests[start : start + QUERIES])
        return [[self._document(point) for point in reply.points] for reply in found]

    def _document(self, point) -> Document:
        source = Source(f"{self.address}, point {point.id}", "The payload of each point must have a text.")
        record = Record(point.payload or {}, source)
        title, text = record.text("title", "", blank=True), record.text("text", blank=True)
        id, more = record.identifier("id", str(point.id)), metadata_of(record)
        return Document(id, title, text, score=point.score, source=self.address, metadata=more)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Whatever goes wrong with the server, as R3LiteError."""
        from qdrant_client.http.exceptions import ApiException

        with explained((ApiException, ValueError), self.address, REMEDY):  # ValueError: of the embedded server
            yield


def point_id(passage: Document) -> str:
    """The same for the same passage, so that filling again writes over and does not double."""
    return str(uuid.uuid5(POINTS, passage.id))


def fill(address: str, passages: Iterable[Document], encoder: Encoder) -> tuple[int, int]:
    """Writes passages with their vectors into a collection, made if it is not there; returns how many were encoded and
    how many it holds. What it has already is passed over, so that after a kill the same call goes on."""
    collection = Collection(address, encoder)
    collection.create()
    collection.check()
    encoded, left = 0, iter(tqdm(passages, "passages", unit="", disable=None))
    while block := list(islice(left, PASSAGES)):
        if new := collection.missing(block):
            collection.write(new)
        encoded += len(new)
    with collection.explained():
        return encoded, collection.client.count(collection.name, exact=True).count
