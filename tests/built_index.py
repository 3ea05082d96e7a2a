"""An index folder, for tests of what reads one."""

from r3lite.retrieval import building
from r3lite.retrieval.encoder import make_encoder
from r3lite.retrieval.index_size import estimate


def save(folder, documents, encoder="hashing", style="auto", kind="flat", dtype="fp32"):
    """Builds an index on the disk."""
    with building.gathered(folder, documents) as build:
        encoder = make_encoder(encoder, style, documents, dtype=dtype)
        building.replaces(build, encoder)
        building.encode(build, encoder, kind)
        building.finish(build, encoder, estimate(kind, len(documents), encoder.dimension))
