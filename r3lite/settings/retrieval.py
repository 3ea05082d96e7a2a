"""Settings of the retriever, and of building an index for it."""

from dataclasses import dataclass
from typing import Annotated, Literal

from r3lite.config import Bounds, Required, Section


@dataclass(frozen=True)
class RetrievalSettings(Section):
    """Retrieval."""

    retriever: Literal["semantic", "golden", "none"] = "semantic"
    """semantic: nearest passages by embedding; golden: the question's own gold paragraphs; none"""
    corpus: str | None = None
    """passages (id, title, text) as JSONL, indexed on the fly; by default the paragraphs that come with --data"""
    index: str | None = None
    """index folder built by `python -m r3lite.index`"""
    encoder: str = "intfloat/e5-base-v2"
    """BERT encoder: folder or hub id; or hashing (TF-IDF on hashed words, no download)"""
    encoder_style: Literal["auto", "e5", "plain"] = "auto"
    """e5: query/passage prefixes; plain: none; auto: e5 if the encoder's name says so"""
    top_k: Annotated[int, Bounds(low=1, high=1000)] = 5
    """passages per query"""


@dataclass(frozen=True)
class IndexSettings(Section):
    """Index."""

    corpus: Annotated[str | None, Required("a JSONL file with one passage (id, title, text) a line")] = None
    """passages (id, title, text) as JSONL"""
    encoder: str = "intfloat/e5-base-v2"
    """BERT encoder: folder or hub id; or hashing (TF-IDF on hashed words, no download)"""
    encoder_style: Literal["auto", "e5", "plain"] = "auto"
    """e5: query/passage prefixes; plain: none; auto: e5 if the encoder's name says so"""
    batch_size: Annotated[int, Bounds(low=1, high=1 << 16)] = 64
    """passages encoded together"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """where passages are encoded; auto: cuda if there is one, else mps, else cpu"""
    skip_bad_rows: bool = False
    """count malformed passages and go on, instead of stopping at the first"""
