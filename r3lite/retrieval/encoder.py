"""The encoders by name: they turn queries and passages into vectors whose inner product is the similarity.

Knows nothing of FAISS. Vectors are float32 [N, dimension] of length 1.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import numpy as np

from r3lite.core.episode import Document
from r3lite.core.files import read_record
from r3lite.retrieval.bert_encoder import BertEncoder
from r3lite.retrieval.bert_folder import REMEDY
from r3lite.retrieval.conventions import passage_text, read_conventions
from r3lite.retrieval.hashing import HASHING, HashingEncoder
from r3lite.retrieval.sentence_encoder import SentenceEncoder
from r3lite.settings import IndexSettings, RetrievalSettings

EncoderSettings = IndexSettings | RetrievalSettings  # both name an encoder, its style and its dtype


class Encoder(Protocol):
    """What an index needs of an encoder. `advance(n)` is told of every n passages that are done."""

    dimension: int
    settings: dict  # what makes vectors comparable; stored with an index and compared when it is opened

    def encode_queries(self, queries: list[str]) -> np.ndarray: ...

    def encode_passages(self, documents: list[Document], advance: Callable[[int], object]) -> np.ndarray: ...


def make_encoder(
    settings: EncoderSettings, documents: Iterable[Document], device: str = "cpu", batch_size: int = 32
) -> Encoder:
    """The encoder of the settings for a new index of `documents`; its vectors are fp32 if it computes in bf16, too."""
    name = settings.encoder
    if name == HASHING:
        return HashingEncoder.fit(map(passage_text, documents))
    # Our own network if it computes what the folder's files say, else sentence-transformers.
    made = BertEncoder if read_conventions(name).other is None else SentenceEncoder
    return made(name, settings.encoder_style, device, batch_size, settings.encoder_dtype)


def known_dimension(name: str) -> int | None:
    """The dimensions of an encoder that is on this machine, without loading it; None if they are not known."""
    from huggingface_hub import try_to_load_from_cache

    if name == HASHING:
        return HashingEncoder.DIMENSION
    path = Path(name) / "config.json" if Path(name).is_dir() else try_to_load_from_cache(name, "config.json")
    return read_record(Path(path), REMEDY).whole("hidden_size", None, low=1) if isinstance(path, (str, Path)) else None
