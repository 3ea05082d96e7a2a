"""Encoders of other networks, by the package sentence-transformers (extra encoders), such as ModernBERT and
Qwen3-Embedding. Vectors are float32 [N, dimension] of length 1.
"""

from collections.abc import Callable

import numpy as np

from r3lite.core.episode import Document
from r3lite.core.errors import explained, extra
from r3lite.retrieval.bert_folder import LONGEST
from r3lite.retrieval.conventions import passage_text, read_conventions, settings_of

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
BLOCK = 16  # batches between two words on how far it is


class SentenceEncoder:
    """A model of sentence-transformers, with the interface of our own encoders.

    The code that a model folder brings along is never run, and weights are read from safetensors.
    """

    def __init__(self, name: str, style: str, device: str = "cpu", batch_size: int = 32, dtype: str = "fp32"):
        found = read_conventions(name)
        what = f"the encoder {name} ({found.other})"
        with extra("encoders", what, "Or use a BERT, such as intfloat/e5-base-v2."):
            from sentence_transformers import SentenceTransformer
        how = {"use_safetensors": True, "dtype": DTYPES[dtype]}
        remedy = "See that all files are there, the weights as safetensors."
        # Exception: whatever a library and a folder of a stranger come to.
        with explained(Exception, f"sentence-transformers cannot load the encoder {name}", remedy):
            self.model = SentenceTransformer(str(found.folder), device=device, local_files_only=True, model_kwargs=how)
        self.batch_size = batch_size
        style, self.prefixes = found.styled(style, name)
        length = min(self.model.max_seq_length or LONGEST, LONGEST)
        self.model.max_seq_length = length
        self.dimension = self.model.get_embedding_dimension()
        self.settings = settings_of(name, style, self.prefixes, length, self.dimension, dtype)

    def encode_queries(self, queries: list[str]) -> np.ndarray:
        return self._encode(queries, self.prefixes[0], lambda n: None)

    def encode_passages(self, documents: list[Document], advance: Callable[[int], object]) -> np.ndarray:
        return self._encode([passage_text(document) for document in documents], self.prefixes[1], advance)

    def _encode(self, texts: list[str], prefix: str, advance: Callable[[int], object]) -> np.ndarray:
        """Vectors [N, C] of N texts."""
        out, size = np.zeros((len(texts), self.dimension), dtype=np.float32), BLOCK * self.batch_size
        for start in range(0, len(texts), size):
            block = texts[start : start + size]
            out[start : start + size] = self.model.encode(
                block, prompt=prefix, batch_size=self.batch_size, show_progress_bar=False
            )
            advance(len(block))
        # Here, in fp32: that package would do it in the model's precision.
        return out / np.maximum(np.linalg.norm(out, axis=1, keepdims=True), np.finfo(np.float32).tiny)
