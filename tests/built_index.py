"""An index folder, for tests of what reads one."""

from r3lite.retrieval import building
from r3lite.retrieval.encoder import make_encoder
from r3lite.retrieval.vectors import estimate
from r3lite.settings import RetrievalSettings


def encoder_settings(encoder="hashing", style="auto", dtype="fp32"):
    return RetrievalSettings(encoder=encoder, encoder_style=style, encoder_dtype=dtype)


def save(folder, documents, encoder="hashing", style="auto", kind="flat", dtype="fp32"):
    """Builds an index on the disk."""
    with building.open_build(folder, documents) as build:
        encoder = make_encoder(encoder_settings(encoder, style, dtype), documents)
        building.replaces_index(build, encoder)
        building.encode(build, encoder, kind)
        building.write_index(build, encoder, estimate(kind, len(documents), encoder.dimension))
